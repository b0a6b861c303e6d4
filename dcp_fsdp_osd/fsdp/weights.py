"""FSDP1's own memory of a model's weights: this rank's piece of each parameter, without a gather.

What FSDP1 keeps comes from :mod:`~dcp_fsdp_osd.fsdp.units`. No collective runs, and nothing is
changed but by :func:`drop_unsharded`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from dcp_fsdp_osd.errors import LayoutError
from dcp_fsdp_osd.fsdp.names import COMPILE_WRAPPER, fqns_of, join_name, module_names
from dcp_fsdp_osd.fsdp.optim import in_two_dimensions, segment_of
from dcp_fsdp_osd.fsdp.units import Place, UnitView, fsdp_units, private_of
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
    places: tuple[Place, ...]
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
    for unit in fsdp_units(names):
        _check_memory(unit, fqns_of(unit.params[0].place, names)[0])
        yield from _unit_shards(unit, names)


def _check_memory(unit: UnitView, fqn: str) -> None:
    """``fqn`` names the unit's first parameter."""
    if unit.training_state != "IDLE":
        raise LayoutError(
            f"{fqn}: expected FSDP's parameters to be sharded, found them in state "
            f"{unit.training_state}: save and load outside of forward, backward and "
            f"summon_full_params"
        )
    moved = unit.local.numel() and unit.flat.data_ptr() != unit.local.data_ptr()
    if moved and unit.shows_local:
        raise LayoutError(
            f"{fqn}: expected FSDP's flat parameter in the memory that FSDP gave it, found other "
            f"memory: dtype or device were changed after the first forward"
        )


def _unit_shards(unit: UnitView, names: dict[nn.Module, list[str]]) -> Iterator[FlatShard]:
    tied: dict[Place, list[Place]] = {}
    for other, primary in unit.tied:
        tied.setdefault(primary, []).append(other)
    replaceable = unit.may_be_replaced
    for param in unit.params:
        places = (param.place, *tied.get(param.place, ()))
        fqns = tuple(fqn for place in places for fqn in fqns_of(place, names))
        segment = segment_of(fqns[0], param)
        piece = unit.local[segment.offset : segment.offset + segment.numel]
        if param.extension is not None:
            segment = in_two_dimensions(segment, param.extension)
        elif replaceable and segment.numel:
            piece = _replaced(getattr(*param.place, None), piece, fqns[0])
        yield FlatShard(fqns, places, replace(segment, offset=0), unit.shard_group, piece)


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
    for unit in fsdp_units(module_names(model)):
        if unit.gathered:
            unit.drop_gathered()


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
