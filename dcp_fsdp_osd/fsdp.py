"""From a live (model, optimizer) to a :class:`~dcp_fsdp_osd.layout.FlatLayout`.

The one module that touches private attributes of FSDP1 (``FullyShardedDataParallel``).  It
reads attributes only: nothing is unsharded, gathered, initialized lazily or changed, and no
collective runs.  An attribute that is not there raises
:class:`~dcp_fsdp_osd.errors.UnsupportedTorchError`, naming the attribute and the torch version.

Read against torch 2.6 to 2.13 (``torch/distributed/fsdp/_flat_param.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

from .errors import LayoutError, UnsupportedTorchError
from .geometry import Box, dim_order
from .layout import FlatLayout, ParamLayout, Segment

__all__ = ["ShardGroup", "Target", "describe_target"]

_Known = dict[int, tuple["ParamLayout", torch.device, "ShardGroup | None"]]

_CHECKPOINT_WRAPPER = "_checkpoint_wrapped_module"
_FSDP_WRAPPER = "_fsdp_wrapped_module"
_COMPILE_WRAPPER = "_orig_mod"


@dataclass(frozen=True)
class ShardGroup:
    """The ranks over which one FSDP1 unit is sharded: a process group, and its mesh if it has one.

    Its *sharded* state is cut by rows, as ``torch.Tensor.chunk`` cuts
    (``torch/distributed/fsdp/_shard_utils.py``), whatever the flat pieces are.
    """

    group: dist.ProcessGroup
    mesh: DeviceMesh | None

    def box(self, shape: Sequence[int]) -> Box:
        """This rank's rows of a tensor of ``shape``; none of them is a box without elements."""
        rows = -(-shape[0] // self.group.size())
        start = min(rows * self.group.rank(), shape[0])
        stop = min(start + rows, shape[0])
        return Box((start, *(0 for _ in shape[1:])), (stop - start, *shape[1:]))

    def tensor(self, local: torch.Tensor, shape: Sequence[int]) -> Any:
        """The whole tensor of ``shape`` of which ``local`` is this rank's box.

        A DTensor where FSDP was given a mesh, else a ShardedTensor. Nothing is communicated.
        """
        size = torch.Size(shape)
        if self.mesh is not None:
            placements = [*(Replicate() for _ in range(self.mesh.ndim - 1)), Shard(0)]
            stride = torch.empty(size, device="meta").stride()
            return DTensor.from_local(
                local, self.mesh, placements, run_check=False, shape=size, stride=stride
            )
        rows = -(-shape[0] // self.group.size())
        shards = [
            ShardMetadata(
                [at, *(0 for _ in shape[1:])],
                [min(rows, shape[0] - at), *shape[1:]],
                self._place(at // rows, local.device),
            )
            for at in range(0, shape[0], rows)
        ]
        mine = self.group.rank()
        return _get(ShardedTensor, "_init_from_local_shards_and_global_metadata", "ShardedTensor")(
            [LocalShard(local, shards[mine])] if mine < len(shards) else [],
            sharded_tensor_metadata=ShardedTensorMetadata(
                shards_metadata=shards,
                size=size,
                tensor_properties=TensorProperties(dtype=local.dtype),
            ),
            process_group=self.group,
        )

    def _place(self, rank: int, device: torch.device) -> str:
        number = dist.get_global_rank(self.group, rank)
        if device.type == "cpu":
            return f"rank:{number}/cpu"
        return f"rank:{number}/{device.type}:{number % torch.accelerator.device_count()}"


@dataclass(frozen=True)
class Target:
    """A live optimizer's layout, and what is needed to allocate its state.

    Attributes:
        layout: holds no tensor.
        params: the optimizer's parameters, in its order; not owned.
        devices: where the state of each belongs (the CPU for offloaded parameters).
        shards: for each parameter that FSDP1 shards, over whom.
    """

    layout: FlatLayout
    params: tuple[torch.Tensor, ...]
    devices: tuple[torch.device, ...]
    shards: tuple[ShardGroup | None, ...] = ()


def describe_target(model: nn.Module, optim: torch.optim.Optimizer) -> Target:
    """Find, for each parameter of ``optim``, which elements of which FQN this rank holds.

    Args:
        model: the (wrapped) model, on whose names the FQNs are based: FSDP1 at any place in it,
            FSDP2, DDP or plain. Wrapper names (FSDP, DDP, ``torch.compile``, activation
            checkpointing) are left out of FQNs, in whatever order they are nested.
        optim: its parameters must all be in ``model``.

    Raises:
        LayoutError: a parameter is not in the model, or its memory is no tensor's that we can cut.
        UnsupportedTorchError: this torch keeps FSDP's layout elsewhere.
    """
    names = _module_names(model)
    known: _Known = {}
    aliases: dict[str, str] = {}
    for module in names:
        if isinstance(module, FullyShardedDataParallel):
            _describe_unit(module, names, known, aliases)
    for module, prefixes in names.items():
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            if not getattr(param, "_is_flat_param", False):
                _describe_plain(param, [_join(p, name) for p in prefixes], known, aliases)
    params: list[torch.Tensor] = []
    devices: list[torch.device] = []
    shards: list[ShardGroup | None] = []
    layouts: list[ParamLayout] = []
    groups: list[tuple[int, ...]] = []
    for number, group in enumerate(optim.param_groups):
        ids = []
        for position, param in enumerate(group["params"]):
            if id(param) not in known:
                raise LayoutError(
                    f"expected every parameter of the optimizer in the model, found that "
                    f"parameter {position} of group {number} (shape {tuple(param.shape)}) is not. "
                    f"With use_orig_params=False the optimizer must be made after the model is "
                    f"wrapped, from model.parameters()"
                )
            described, device, shard = known[id(param)]
            ids.append(len(params))
            params.append(param)
            layouts.append(described)
            devices.append(device)
            shards.append(shard)
        groups.append(tuple(ids))
    own = {fqn for described in layouts for fqn in described.fqns}
    aliases = {alias: fqn for alias, fqn in aliases.items() if fqn in own and alias != fqn}
    layout = FlatLayout(tuple(layouts), aliases, tuple(groups))
    return Target(layout, tuple(params), tuple(devices), tuple(shards))


def _describe_plain(
    param: torch.Tensor,
    fqns: list[str],
    known: _Known,
    aliases: dict[str, str],
) -> None:
    """A parameter that FSDP1 does not manage, or a further name of one that is known."""
    if id(param) in known:
        layout = known[id(param)][0]
        if len(layout.fqns) == 1:  # the first name that was met stays; others are tied to it
            aliases.update((fqn, layout.fqns[0]) for fqn in fqns if fqn != layout.fqns[0])
        return
    shape = tuple(param.shape)
    layout = ParamLayout((fqns[0],), (shape,), "whole")
    if isinstance(param, DTensor):
        like: Any = param
        boxes = like.__create_chunk_list__() if param.device_mesh.get_coordinate() else []
        parts = [(tuple(box.offsets), tuple(box.sizes)) for box in boxes]
        part = parts[0] if parts and parts[0][1] != shape else None
        sharded = not all(placement.is_replicate() for placement in param.placements)
        layout = ParamLayout((fqns[0],), (shape,), "dtensor", sharded=sharded, part=part)
    known[id(param)] = (layout, param.device, None)
    aliases.update((fqn, fqns[0]) for fqn in fqns[1:])


def _describe_unit(
    module: FullyShardedDataParallel,
    names: dict[nn.Module, list[str]],
    known: _Known,
    aliases: dict[str, str],
) -> None:
    """The parameters that one FSDP instance has flattened."""
    handle = _get(module, "_handle", "FullyShardedDataParallel")
    if handle is None:  # manages no parameter itself
        return
    flat = _get(handle, "flat_param", "FlatParamHandle")
    sharded = bool(_get(handle, "uses_sharded_strategy", "FlatParamHandle"))
    infos = _get(flat, "_param_infos", "FlatParameter")
    shards = _get(flat, "_shard_param_infos", "FlatParameter")
    shapes = _get(flat, "_shapes", "FlatParameter")
    strides = _get(flat, "_strides", "FlatParameter")
    extensions = _get(flat, "_param_extensions", "FlatParameter")
    originals = _get(flat, "_params", "FlatParameter")
    numel = _get(flat, "_sharded_size", "FlatParameter").numel()
    local = getattr(flat, "_local_shard", None)  # set at the first forward
    device = local.device if local is not None else flat.device
    group = _get(module, "process_group", "FullyShardedDataParallel")
    mesh = _get(module, "_device_mesh", "FullyShardedDataParallel")
    shard_group = ShardGroup(group, mesh) if sharded else None
    fqns: list[str] = []
    segments: list[Segment] = []
    for info, shard, shape, stride, extension in zip(
        infos, shards, shapes, strides, extensions, strict=True
    ):
        fqn, *others = _fqns(info, names)
        if extension is not None:
            raise LayoutError(
                f"{fqn}: FSDP over tensor parallelism shards this parameter in two dimensions; a "
                f"flat piece of it cannot be written as boxes. Use FSDP2 (fully_shard) with TP"
            )
        aliases.update((other, fqn) for other in others)
        fqns.append(fqn)
        segments.append(_segment(fqn, tuple(shape), tuple(stride), shard))
    for info in _get(flat, "_shared_param_infos", "FlatParameter"):
        primary = _fqns((info.prim_param_name, info.prim_module), names)[0]
        aliases.update((other, primary) for other in _fqns((info.param_name, info.module), names))
    whole_shapes = tuple(s.shape for s in segments)
    if originals is None:  # use_orig_params=False
        known[id(flat)] = (
            ParamLayout(tuple(fqns), whole_shapes, "flat", tuple(segments), numel, sharded),
            device,
            shard_group,
        )
        return
    for param, segment in zip(originals, segments, strict=True):
        if sharded:
            own = Segment(segment.fqn, segment.shape, segment.start, segment.stop, 0, segment.order)
            layout = ParamLayout((own.fqn,), (own.shape,), "flat", (own,), own.numel, True)
        else:
            layout = ParamLayout((segment.fqn,), (segment.shape,), "whole")
        known[id(param)] = (layout, device, shard_group)


def _segment(fqn: str, shape: tuple[int, ...], stride: tuple[int, ...], shard: Any) -> Segment:
    try:
        order = dim_order(shape, stride)
    except ValueError as error:
        raise LayoutError(f"{fqn}: {error}; call .contiguous() before wrapping") from error
    if not _get(shard, "in_shard", "_ShardParamInfo"):
        return Segment(fqn, shape, 0, 0, 0, order)
    start = _get(shard, "intra_param_start_idx", "_ShardParamInfo")
    numel = _get(shard, "numel_in_shard", "_ShardParamInfo")
    offset = _get(shard, "offset_in_shard", "_ShardParamInfo")
    return Segment(fqn, shape, start, start + numel, offset, order)


def _module_names(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Each module of the tree with its names in the unwrapped model, in traversal order.

    A module that is used in several places has several names, the first of which counts.
    """
    names: dict[nn.Module, list[str]] = {}
    for name, module in _walk(model, ""):
        names.setdefault(module, []).append(name)
    return names


def _walk(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    yield name, module
    for child_name, child in module._modules.items():
        if child is not None:
            inner = name if _is_wrapper(module, child_name) else _join(name, child_name)
            yield from _walk(child, inner)


def _is_wrapper(module: nn.Module, child: str) -> bool:
    """Whether ``child`` names what a wrapper wraps (a user's own ``module`` does not)."""
    if child == "module":
        return isinstance(module, DistributedDataParallel | DataParallel)
    return child in (_FSDP_WRAPPER, _COMPILE_WRAPPER, _CHECKPOINT_WRAPPER)


def _fqns(info: Any, names: dict[nn.Module, list[str]]) -> list[str]:
    """All names of the parameter of a ``ParamInfo`` (name, module, ...)."""
    name, module = info[0], info[1]
    if module not in names:
        raise LayoutError(
            f"expected the module that holds parameter {name!r} ({type(module).__name__}) in the "
            f"model, found that it was replaced or removed after FSDP wrapped it"
        )
    return [_join(prefix, name) for prefix in names[module]]


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _get(owner: Any, name: str, of: str) -> Any:
    """A private attribute of FSDP, or an error that names it and the torch version."""
    try:
        return getattr(owner, name)
    except AttributeError as error:
        raise UnsupportedTorchError(
            f"torch {torch.__version__} has no {of}.{name}, from which FSDP's layout is read; "
            f"supported are torch 2.6 to 2.13"
        ) from error
