"""FSDP1's own memory of a model's weights: this rank's piece of each parameter, without a gather.

Touches private attributes of FSDP1, as :mod:`~dcp_fsdp_osd.fsdp.optim` does and under the same
rules: an attribute that is not there raises :class:`~dcp_fsdp_osd.errors.UnsupportedTorchError`,
and no collective runs. Nothing is changed but by :func:`drop_unsharded`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from dcp_fsdp_osd.errors import LayoutError
from dcp_fsdp_osd.fsdp.names import COMPILE_WRAPPER, fqns_of, join_name, module_names
from dcp_fsdp_osd.fsdp.optim import in_two_dimensions, private_of, segment_of
from dcp_fsdp_osd.layout.flat import Segment

__all__ = ["FlatShard", "drop_unsharded", "flat_shards", "low_precision_buffers"]


@dataclass(frozen=True)
class FlatShard:
    """One parameter that FSDP1 manages, and this rank's memory of it.

    Attributes:
        names: its FQNs, the first of which it was flattened under; others are tied to it.
        places: (module, attribute) of each; a module may have several names.
        segment: the elements that this rank holds; of ``local``, so that its offset is 0.
        shard_group: as :attr:`~dcp_fsdp_osd.layout.flat.ParamLayout.shard_group`.
        local: 1-D, ``segment.numel`` elements, full precision; FSDP's own memory, a view.
    """

    names: tuple[str, ...]
    places: tuple[tuple[nn.Module, str], ...]
    segment: Segment
    shard_group: int
    local: torch.Tensor


def flat_shards(model: nn.Module) -> Iterator[FlatShard]:
    """Every parameter that FSDP1 manages in ``model``, on ranks that hold nothing of it too.

    Raises:
        LayoutError: FSDP is in forward, backward or ``summon_full_params``, when the local shards
            are not what counts; or the memory is nothing that we can cut.
    """
    names = module_names(model)
    for module in names:
        if isinstance(module, FullyShardedDataParallel):
            handle = private_of(module, "_handle", "FullyShardedDataParallel")
            if handle is not None:
                group = private_of(module, "process_group", "FullyShardedDataParallel")
                shard_group = min(dist.get_process_group_ranks(group))
                yield from _unit_shards(handle, names, shard_group)


def _unit_shards(
    handle: Any, names: dict[nn.Module, list[str]], shard_group: int
) -> Iterator[FlatShard]:
    flat = private_of(handle, "flat_param", "FlatParamHandle")
    infos = private_of(flat, "_param_infos", "FlatParameter")
    state = private_of(handle, "_training_state", "FlatParamHandle").name
    if state != "IDLE":
        raise LayoutError(
            f"{fqns_of(infos[0], names)[0]}: expected FSDP's parameters to be sharded, found them "
            f"in state {state}: save and load outside of forward, backward and summon_full_params"
        )
    local = getattr(flat, "_local_shard", None)  # set at the first forward
    local = flat.detach() if local is None else local.detach()
    shown = not handle.uses_sharded_strategy or handle.is_sharded(flat)
    if shown and local.numel() and flat.data_ptr() != local.data_ptr():
        raise LayoutError(
            f"{fqns_of(infos[0], names)[0]}: expected FSDP's flat parameter in the memory that "
            f"FSDP gave it, found other memory: dtype or device were changed after the first "
            f"forward"
        )
    tied: dict[tuple[nn.Module, str], list[tuple[nn.Module, str]]] = {}
    for shared in private_of(flat, "_shared_param_infos", "FlatParameter"):
        first = (shared.prim_module, shared.prim_param_name)
        tied.setdefault(first, []).append((shared.module, shared.param_name))
    own = shown and not private_of(handle, "_skipped_use_sharded_views", "FlatParamHandle")
    if not own or private_of(flat, "_params", "FlatParameter") is None:
        own = False  # nobody else can have changed the parameters
    for info, shard, shape, stride, extension in zip(
        infos,
        private_of(flat, "_shard_param_infos", "FlatParameter"),
        private_of(flat, "_shapes", "FlatParameter"),
        private_of(flat, "_strides", "FlatParameter"),
        private_of(flat, "_param_extensions", "FlatParameter"),
        strict=True,
    ):
        first = (info.module, info.param_name)
        places = (first, *tied.get(first, ()))
        fqns = tuple(fqn for module, name in places for fqn in fqns_of((name, module), names))
        at = segment_of(fqns[0], tuple(shape), tuple(stride), shard)
        piece = local[at.offset : at.offset + at.numel]
        if extension is not None:
            at = in_two_dimensions(at, extension)
        elif own and at.numel:
            piece = _replaced(getattr(info.module, info.param_name, None), piece, fqns[0])
        yield FlatShard(fqns, places, replace(at, offset=0), shard_group, piece)


def _replaced(param: torch.Tensor | None, piece: torch.Tensor, fqn: str) -> torch.Tensor:
    """``piece``, or what the user put in its place: FSDP takes that over at the next forward."""
    if param is None or _storage(param) == _storage(piece):
        return piece
    if param.numel() != piece.numel() or not param.is_contiguous() or param.dtype != piece.dtype:
        raise LayoutError(
            f"{fqn}: expected the parameter to be {piece.numel()} elements of {piece.dtype} of "
            f"FSDP's flat parameter, found that it was replaced by {param.dtype} "
            f"{tuple(param.shape)}"
        )
    return param.detach().view(-1)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def drop_unsharded(model: nn.Module) -> None:
    """Let FSDP1 forget gathered parameters that it still holds, so that it gathers them anew.

    The root unit keeps them after a forward that no backward followed, as do all units with
    ``SHARD_GRAD_OP``; after the local shards were written they are stale. No collective.
    """
    for module in module_names(model):
        if not isinstance(module, FullyShardedDataParallel):
            continue
        handle = private_of(module, "_handle", "FullyShardedDataParallel")
        if handle is None or not handle.uses_sharded_strategy:
            continue
        if getattr(handle.flat_param, "_full_param_padded", None) is None:
            continue  # no forward yet
        if not handle.needs_unshard() or not handle.is_sharded(handle.flat_param):
            handle.reshard(True)
            handle.post_reshard()
            private_of(handle, "_prefetched", "FlatParamHandle")
            handle._prefetched = False


def low_precision_buffers(model: nn.Module) -> dict[str, torch.dtype]:
    """Buffers that FSDP1 keeps in another dtype than they had -> that dtype, which is saved."""
    found: dict[str, torch.dtype] = {}
    for module, prefixes in module_names(model).items():
        if not isinstance(module, FullyShardedDataParallel):
            continue
        if module.mixed_precision.buffer_dtype is None:
            continue
        ignored = private_of(module, "_ignored_buffer_names", "FullyShardedDataParallel")
        dtypes = private_of(module, "_buffer_name_to_orig_dtype", "FullyShardedDataParallel")
        for name, dtype in dtypes.items():
            if name not in ignored:
                clean = name.replace(COMPILE_WRAPPER + ".", "")
                found.update((join_name(prefix, clean), dtype) for prefix in prefixes)
    return found
