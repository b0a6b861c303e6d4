"""The units of FSDP1 in a model, each read once: the one place for FSDP1's private attributes.

Attributes are read, and nothing else: nothing is unsharded, gathered, initialized lazily or
changed, and no collective runs. An attribute that is not there raises
:class:`~dcp_fsdp_osd.errors.UnsupportedTorchError`, naming the attribute and the torch version.

Read against torch 2.6 to 2.15 (``torch/distributed/fsdp/_flat_param.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FlatParameter, FullyShardedDataParallel, _common_utils

from dcp_fsdp_osd.compat import private

__all__ = ["Place", "UnitParam", "UnitView", "fsdp_units", "is_fsdp_managed", "private_of"]

Place = tuple[nn.Module, str]
"""A module and the name of its attribute that a parameter is."""


def private_of(owner: Any, name: str, of: str) -> Any:
    """A private attribute of FSDP, or an error that names it and the torch version."""
    return private(owner, name, of, "from which FSDP's layout is read")


def _set_later(flat: torch.Tensor, name: str) -> Any:
    """An attribute that FSDP gives a flat parameter at the first forward; None before."""
    if not hasattr(flat, name) and name in FlatParameter.__annotations__:
        return None
    return private_of(flat, name, "FlatParameter")


def is_fsdp_managed(param: torch.Tensor) -> bool:
    """Whether ``param`` is a flat parameter of FSDP1, or one rank's piece of one."""
    flattened = private_of(_common_utils, "_is_fsdp_flattened", "fsdp._common_utils")
    return isinstance(param, FlatParameter) or bool(flattened(param))


@dataclass(frozen=True)
class UnitParam:
    """One parameter that a unit has flattened.

    Attributes:
        place: where the model has it.
        shape, stride: of what was flattened; of the local shard, for a DTensor.
        start, stop: the elements that this rank holds, half-open, in memory order; 0 and 0 if none.
        offset: of the first of them in this rank's piece of the flat parameter.
        extension: what ``torch.distributed.tensor.parallel.fsdp`` keeps of a DTensor: its spec.
        param: with ``use_orig_params``, what the module and the optimizer have of it; else None.
    """

    place: Place
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    stop: int
    offset: int
    extension: Any
    param: torch.Tensor | None


@dataclass(frozen=True)
class UnitView:
    """One FSDP1 instance that has flattened parameters, as it is now.  Owns nothing.

    Attributes:
        handle: FSDP's own ``FlatParamHandle``.
        flat: the flat parameter, which is the optimizer's without ``use_orig_params``.
        local: this rank's piece of it, in full precision: 1-D, detached, FSDP's own memory.
        numel: elements of that piece, padding included.
        params: in the order in which they were flattened.
        tied: (other place, place among `params`) of each further use of one of them.
        tied_params: with ``use_orig_params``, what modules have at these other places.
        orig_params: the ``use_orig_params`` that it was made with.
        sharded: over several ranks.
        group: over which it is sharded (or that hold it alike, if it is not).
        shard_group: the lowest global rank of `group`.
        mesh: that FSDP was given, if it was.
        extended: FSDP flattens DTensors of tensor parallelism.
    """

    handle: Any
    flat: torch.Tensor
    local: torch.Tensor
    numel: int
    params: tuple[UnitParam, ...]
    tied: tuple[tuple[Place, Place], ...]
    tied_params: tuple[torch.Tensor, ...]
    orig_params: bool
    sharded: bool
    group: dist.ProcessGroup
    shard_group: int
    mesh: DeviceMesh | None
    extended: bool

    @property
    def replicated(self) -> bool:
        """Whether there may be ranks outside of its shard group that hold the same."""
        world = dist.get_world_size()
        return world > 1 and (not self.sharded or dist.get_world_size(self.group) < world)

    @property
    def training_state(self) -> str:
        """``"IDLE"`` outside of forward, backward and ``summon_full_params``."""
        name: str = private_of(self.handle, "_training_state", "FlatParamHandle").name
        return name

    @property
    def shows_local(self) -> bool:
        """The flat parameter, or the original ones, are views of :attr:`local` now."""
        return not self.sharded or bool(self.handle.is_sharded(self.flat))

    @property
    def may_be_replaced(self) -> bool:
        """The user may have put other memory in the place of an original parameter's."""
        skipped = private_of(self.handle, "_skipped_use_sharded_views", "FlatParamHandle")
        return self.shows_local and self.orig_params and not skipped

    @property
    def gathered(self) -> bool:
        """FSDP still holds all of a sharded flat parameter."""
        if not self.sharded or _set_later(self.flat, "_full_param_padded") is None:
            return False
        return not self.handle.needs_unshard() or not self.handle.is_sharded(self.flat)

    def drop_gathered(self) -> None:
        """Let FSDP forget what it gathered, and gather it anew."""
        self.handle.reshard(True)
        self.handle.post_reshard()
        private_of(self.handle, "_prefetched", "FlatParamHandle")
        self.handle._prefetched = False


def fsdp_units(modules: Iterable[nn.Module]) -> Iterator[UnitView]:
    """The FSDP1 instances among ``modules`` that have flattened parameters themselves."""
    for module in modules:
        if isinstance(module, FullyShardedDataParallel):
            handle = private_of(module, "_handle", "FullyShardedDataParallel")
            if handle is not None:
                yield _read(module, handle)


def _read(module: FullyShardedDataParallel, handle: Any) -> UnitView:
    flat = private_of(handle, "flat_param", "FlatParamHandle")
    infos = private_of(flat, "_param_infos", "FlatParameter")
    originals = private_of(flat, "_params", "FlatParameter")
    local = _set_later(flat, "_local_shard")
    tied = private_of(flat, "_shared_param_infos", "FlatParameter")
    mesh = private_of(module, "_device_mesh", "FullyShardedDataParallel")
    group = private_of(module, "process_group", "FullyShardedDataParallel")
    extension = None
    if mesh is not None:
        extension = private_of(module, "_fsdp_extension", "FullyShardedDataParallel")
    return UnitView(
        handle=handle,
        flat=flat,
        local=(flat if local is None else local).detach(),
        numel=private_of(flat, "_sharded_size", "FlatParameter").numel(),
        params=tuple(
            UnitParam(
                (info.module, info.param_name),
                tuple(shape),
                tuple(stride),
                *_held(shard),
                extension=spec,
                param=param,
            )
            for info, shard, shape, stride, spec, param in zip(
                infos,
                private_of(flat, "_shard_param_infos", "FlatParameter"),
                private_of(flat, "_shapes", "FlatParameter"),
                private_of(flat, "_strides", "FlatParameter"),
                private_of(flat, "_param_extensions", "FlatParameter"),
                [None] * len(infos) if originals is None else originals,
                strict=True,
            )
        ),
        tied=tuple(
            ((each.module, each.param_name), (each.prim_module, each.prim_param_name))
            for each in tied
        ),
        tied_params=tuple(private_of(flat, "_shared_params", "FlatParameter") or ()),
        orig_params=originals is not None,
        sharded=bool(private_of(handle, "uses_sharded_strategy", "FlatParamHandle")),
        group=group,
        shard_group=min(dist.get_process_group_ranks(group)),
        mesh=mesh,
        extended=extension is not None,
    )


def _held(shard: Any) -> tuple[int, int, int]:
    """``start``, ``stop`` and ``offset`` of a :class:`UnitParam`."""
    if not private_of(shard, "in_shard", "_ShardParamInfo"):
        return 0, 0, 0
    start = private_of(shard, "intra_param_start_idx", "_ShardParamInfo")
    numel = private_of(shard, "numel_in_shard", "_ShardParamInfo")
    return start, start + numel, private_of(shard, "offset_in_shard", "_ShardParamInfo")
