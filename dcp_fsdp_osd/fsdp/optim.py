"""From a live (model, optimizer) to a :class:`~dcp_fsdp_osd.layout.flat.FlatLayout`.

The one module that touches private attributes of FSDP1 (``FullyShardedDataParallel``), beside
:mod:`~dcp_fsdp_osd.fsdp.weights`, which has the weights' memory under the same rules.  It reads
attributes only: nothing is unsharded, gathered, initialized lazily or changed, and no collective
runs.  An attribute that is not there raises
:class:`~dcp_fsdp_osd.errors.UnsupportedTorchError`, naming the attribute and the torch version.

Read against torch 2.6 to 2.15 (``torch/distributed/fsdp/_flat_param.py``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement

from dcp_fsdp_osd.compat import private, root_mesh
from dcp_fsdp_osd.errors import LayoutError
from dcp_fsdp_osd.fsdp.names import fqns_of, join_name, module_names
from dcp_fsdp_osd.layout.flat import FlatLayout, ParamKind, ParamLayout, Segment
from dcp_fsdp_osd.layout.geometry import Box, dim_order
from dcp_fsdp_osd.layout.placements import dtensor_problem, local_box, placement_text, wrong_rows

__all__ = [
    "ShardGroup",
    "Target",
    "check_unwrapped",
    "describe_target",
    "in_two_dimensions",
    "private_of",
    "segment_of",
    "unmet_params",
]

_Known = dict[int, tuple["ParamLayout", torch.device, "dict[str, ShardGroup | None]"]]


@dataclass(frozen=True)
class ShardGroup:
    """The ranks over which one FSDP1 unit is sharded: a process group, and its mesh if it has one.

    Its *sharded* state is cut by rows, as ``torch.Tensor.chunk`` cuts
    (``torch/distributed/fsdp/_shard_utils.py``), whatever the flat pieces are; over a mesh as
    ``placements`` say.
    """

    group: dist.ProcessGroup
    mesh: DeviceMesh | None
    placements: tuple[Placement, ...] = ()

    def box(self, shape: Sequence[int]) -> Box:
        """This rank's rows of a tensor of ``shape``; none of them is a box without elements."""
        if self.mesh is not None:
            return local_box(self.mesh, self.placements, torch.Size(shape))
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
            stride = torch.empty(size, device="meta").stride()
            return DTensor.from_local(
                local, self.mesh, self.placements, run_check=False, shape=size, stride=stride
            )
        rows = -(-shape[0] // self.group.size())
        starts = range(0, shape[0], rows) if rows else [0] * self.group.size()
        shards = [
            ShardMetadata(
                [at, *(0 for _ in shape[1:])],
                [min(rows, shape[0] - at), *shape[1:]],
                self._place(rank, local.device),
            )
            for rank, at in enumerate(starts)
        ]
        mine = self.group.rank()
        return private_of(
            ShardedTensor, "_init_from_local_shards_and_global_metadata", "ShardedTensor"
        )(
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
        shards: for each FQN that FSDP1 shards, over whom.
    """

    layout: FlatLayout
    params: tuple[torch.Tensor, ...]
    devices: tuple[torch.device, ...]
    shards: Mapping[str, ShardGroup] = field(default_factory=dict)


def describe_target(model: nn.Module, optim: torch.optim.Optimizer) -> Target:
    """Find, for each parameter of ``optim``, which elements of which FQN this rank holds.

    Args:
        model: the (wrapped) model, on whose names the FQNs are based: FSDP1 at any place in it,
            FSDP2, DDP or plain. Wrapper names (FSDP, DDP, ``torch.compile``, activation
            checkpointing) are left out of FQNs, in whatever order they are nested.
        optim: its parameters must all be in ``model``.

    Raises:
        LayoutError: a parameter is not in the model, or its memory is no tensor's that we can cut.
            What other ranks may not find of theirs is left to ``layout.check``.
        UnsupportedTorchError: this torch keeps FSDP's layout elsewhere.
    """
    names = module_names(model)
    known: _Known = {}
    aliases: dict[str, str] = {}
    for module in names:
        if isinstance(module, FullyShardedDataParallel):
            _describe_unit(module, names, known, aliases)
    unmet = unmet_params(model)
    for module, prefixes in names.items():
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(param) in unmet or not getattr(param, "_is_flat_param", False):
                fqns = [join_name(p, name) for p in prefixes]
                _describe_plain(param, fqns, known, aliases, unmet.get(id(param), ""))
    params: list[torch.Tensor] = []
    devices: list[torch.device] = []
    shards: dict[str, ShardGroup] = {}
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
            shards.update((fqn, over) for fqn, over in shard.items() if over is not None)
        groups.append(tuple(ids))
    own = {fqn for described in layouts for fqn in described.fqns}
    aliases = {alias: fqn for alias, fqn in aliases.items() if fqn in own and alias != fqn}
    number_of = {id(param): number for number, param in enumerate(params)}
    flat_names = {
        join_name(prefix, name): number_of[id(param)]
        for module, prefixes in names.items()
        for name, param in module.named_parameters(recurse=False)
        for prefix in prefixes
        if getattr(param, "_is_flat_param", False) and id(param) in number_of
    }
    layout = FlatLayout(tuple(layouts), aliases, tuple(groups), flat_names)
    return Target(layout, tuple(params), tuple(devices), shards)


def check_unwrapped(layout: FlatLayout, params: Sequence[torch.Tensor | None]) -> None:
    """Raise LayoutError if a parameter that was whole is so no more; those that are gone pass.

    To be called where all ranks learn of one's error.
    """
    for described, param in zip(layout.params, params, strict=True):
        if described.kind is ParamKind.WHOLE and param is not None:
            found, shape = tuple(param.shape), described.shapes[0]
            if found != shape:
                raise LayoutError(
                    f"{described.fqns[0]}: expected a parameter of shape {shape}, as it was when "
                    f"the planner was made, found {found}: make the planner after the model is "
                    f"wrapped"
                )


def _describe_plain(
    param: torch.Tensor,
    fqns: list[str],
    known: _Known,
    aliases: dict[str, str],
    problem: str,
) -> None:
    """A parameter that FSDP1 does not manage (or has a ``problem``), or one more name of one."""
    if id(param) in known:
        layout = known[id(param)][0]
        if len(layout.fqns) == 1:  # the first name that was met stays; others are tied to it
            aliases.update((fqn, layout.fqns[0]) for fqn in fqns if fqn != layout.fqns[0])
        return
    shape = tuple(param.shape)
    layout = ParamLayout((fqns[0],), (shape,), ParamKind.WHOLE, problem=problem)
    if isinstance(param, DTensor):
        box = None
        if param.device_mesh.get_coordinate() is not None:
            box = local_box(param.device_mesh, param.placements, param.shape)
            box = box if box.sizes != shape else None
        sharded = not all(placement.is_replicate() for placement in param.placements)
        problem = dtensor_problem(fqns[0], param)
        layout = ParamLayout(
            (fqns[0],),
            (shape,),
            ParamKind.DTENSOR,
            sharded=sharded,
            box=box,
            problem=problem,
            placed=placement_text(param),
        )
    known[id(param)] = (layout, param.device, {})
    aliases.update((fqn, fqns[0]) for fqn in fqns[1:])


def unmet_params(model: nn.Module, *, replaced: bool = True) -> dict[int, str]:
    """What is wrong with parameters, by ``id``, that FSDP1 manages and no unit in ``model`` knows.

    They are flat, or one rank's piece, whatever else they look like.

    Args:
        replaced: also those that were put in the place of one that FSDP flattened.
    """
    names = module_names(model)
    met: set[int] = set()
    managed: set[tuple[int, str]] = set()
    for module in names:
        handle = None
        if isinstance(module, FullyShardedDataParallel):
            handle = private_of(module, "_handle", "FullyShardedDataParallel")
        if handle is None:
            continue
        flat = private_of(handle, "flat_param", "FlatParamHandle")
        met.add(id(flat))
        met.update(id(p) for p in private_of(flat, "_params", "FlatParameter") or ())
        met.update(id(p) for p in private_of(flat, "_shared_params", "FlatParameter") or ())
        for info in private_of(flat, "_param_infos", "FlatParameter"):
            managed.add((id(info.module), info.param_name))
        for info in private_of(flat, "_shared_param_infos", "FlatParameter"):
            managed.add((id(info.module), info.param_name))
    found: dict[int, str] = {}
    for module, (prefix, *_) in names.items():
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(param) in met:
                continue
            fqn = join_name(prefix, name)
            if replaced and (id(module), name) in managed:
                found[id(param)] = (
                    f"{fqn}: expected the parameter that FSDP flattened, found that another was "
                    f"put in its place after FSDP wrapped the model; change it in place "
                    f"(param.copy_), or run a forward pass before the optimizer is made"
                )
            elif getattr(param, "_fsdp_flattened", False) or getattr(
                param, "_is_flat_param", False
            ):
                found[id(param)] = (
                    f"{fqn}: expected the whole model, found a parameter (here of shape "
                    f"{tuple(param.shape)}) that is managed by an FSDP unit outside of the module "
                    f"that was passed, as with model.module of an FSDP root or a submodule of a "
                    f"unit: pass the model that FSDP wrapped, not what is inside of it"
                )
    return found


def _describe_unit(
    module: FullyShardedDataParallel,
    names: dict[nn.Module, list[str]],
    known: _Known,
    aliases: dict[str, str],
) -> None:
    """The parameters that one FSDP instance has flattened."""
    handle = private_of(module, "_handle", "FullyShardedDataParallel")
    if handle is None:  # manages no parameter itself
        return
    flat = private_of(handle, "flat_param", "FlatParamHandle")
    sharded = bool(private_of(handle, "uses_sharded_strategy", "FlatParamHandle"))
    infos = private_of(flat, "_param_infos", "FlatParameter")
    shards = private_of(flat, "_shard_param_infos", "FlatParameter")
    shapes = private_of(flat, "_shapes", "FlatParameter")
    strides = private_of(flat, "_strides", "FlatParameter")
    extensions = private_of(flat, "_param_extensions", "FlatParameter")
    originals = private_of(flat, "_params", "FlatParameter")
    numel = private_of(flat, "_sharded_size", "FlatParameter").numel()
    local = getattr(flat, "_local_shard", None)  # set at the first forward
    device = local.device if local is not None else flat.device
    group = private_of(module, "process_group", "FullyShardedDataParallel")
    mesh = private_of(module, "_device_mesh", "FullyShardedDataParallel")
    shard_group = min(dist.get_process_group_ranks(group))
    fqns: list[str] = []
    segments: list[Segment] = []
    groups: list[ShardGroup | None] = []
    problems: list[str] = []
    for info, shard, shape, stride, extension in zip(
        infos, shards, shapes, strides, extensions, strict=True
    ):
        fqn, *others = fqns_of(info, names)
        aliases.update((other, fqn) for other in others)
        fqns.append(fqn)
        segment = segment_of(fqn, tuple(shape), tuple(stride), shard)
        problems.append("")
        if extension is not None:
            try:
                segment = in_two_dimensions(segment, extension)
            except LayoutError as error:  # of this rank alone, maybe
                problems[-1] = str(error)
            if not sharded and originals is not None:
                raise LayoutError(
                    f"{fqn}: expected FSDP over tensor parallelism to shard over several ranks, or "
                    f"to have use_orig_params=False, found an unsharded FSDP unit with "
                    f"use_orig_params=True, which torch itself cannot train"
                )
        segments.append(segment)
        groups.append(_shard_group(module, group, mesh, extension) if sharded else None)
    for info in private_of(flat, "_shared_param_infos", "FlatParameter"):
        primary = fqns_of((info.prim_param_name, info.prim_module), names)[0]
        aliases.update((other, primary) for other in fqns_of((info.param_name, info.module), names))
    whole_shapes = tuple(s.shape for s in segments)
    if originals is None:  # use_orig_params=False
        cut = sharded or any(segment.within is not None for segment in segments)
        layout = ParamLayout(
            tuple(fqns),
            whole_shapes,
            ParamKind.FLAT,
            tuple(segments),
            numel,
            cut,
            shard_group=shard_group,
            problem="\n".join(filter(None, problems)),
        )
        known[id(flat)] = (layout, device, dict(zip(fqns, groups, strict=True)))
        return
    for param, segment, over, problem in zip(originals, segments, groups, problems, strict=True):
        if sharded:
            own = dataclasses.replace(segment, offset=0)
            layout = ParamLayout(
                (own.fqn,),
                (own.shape,),
                ParamKind.FLAT,
                (own,),
                own.numel,
                True,
                shard_group=shard_group,
                problem=problem,
            )
        else:
            layout = ParamLayout((segment.fqn,), (segment.shape,), ParamKind.WHOLE)
        known[id(param)] = (layout, device, {segment.fqn: over})


def in_two_dimensions(segment: Segment, extension: Any) -> Segment:
    """A segment of the local shard of a DTensor as one of the whole tensor.

    ``extension`` is what ``torch.distributed.tensor.parallel.fsdp`` keeps for a DTensor: its spec.
    """
    fqn = segment.fqn
    if not isinstance(extension, DTensorSpec):
        raise LayoutError(
            f"{fqn}: expected FSDP to have flattened a tensor or a DTensor, found an extension "
            f"that keeps {type(extension).__name__}, of which the whole tensor is not known"
        )
    whole = tuple(extension.shape)
    problem = wrong_rows(fqn, extension.mesh.shape, extension.placements, whole)
    if problem:
        raise LayoutError(problem)
    part = local_box(extension.mesh, extension.placements, extension.shape)
    if part.sizes != segment.shape:
        raise LayoutError(
            f"{fqn}: expected the local shard of {extension} to be of shape {part.sizes}, found "
            f"that FSDP flattened one of {segment.shape}"
        )
    return dataclasses.replace(segment, shape=whole, within=None if part.sizes == whole else part)


def _shard_group(
    module: FullyShardedDataParallel, group: dist.ProcessGroup, mesh: DeviceMesh | None, spec: Any
) -> ShardGroup:
    """How stock cuts *sharded* values of a parameter, with ``spec`` if it is a DTensor.

    With a mesh that is a slice of another, the values are DTensors over the whole of that
    (``torch.distributed.tensor.parallel.fsdp._chunk_dtensor``).
    """
    if mesh is None:
        return ShardGroup(group, None)
    if private_of(module, "_fsdp_extension", "FullyShardedDataParallel") is None:
        return ShardGroup(group, mesh, (*(Replicate() for _ in range(mesh.ndim - 1)), Shard(0)))
    root = root_mesh(mesh)
    placements: list[Placement] = [Replicate() for _ in range(root.ndim)]
    if spec is None:
        placements[0] = Shard(0)
    else:
        placements[-2:] = [Shard(0), spec.placements[0]]
    return ShardGroup(group, root, tuple(placements))


def segment_of(fqn: str, shape: tuple[int, ...], stride: tuple[int, ...], shard: Any) -> Segment:
    try:
        order = dim_order(shape, stride)
    except ValueError as error:
        raise LayoutError(f"{fqn}: {error}; call .contiguous() before wrapping") from error
    if not private_of(shard, "in_shard", "_ShardParamInfo"):
        return Segment(fqn, shape, 0, 0, 0, order)
    start = private_of(shard, "intra_param_start_idx", "_ShardParamInfo")
    numel = private_of(shard, "numel_in_shard", "_ShardParamInfo")
    offset = private_of(shard, "offset_in_shard", "_ShardParamInfo")
    return Segment(fqn, shape, start, start + numel, offset, order)


def private_of(owner: Any, name: str, of: str) -> Any:
    """A private attribute of FSDP, or an error that names it and the torch version."""
    return private(owner, name, of, "from which FSDP's layout is read")
