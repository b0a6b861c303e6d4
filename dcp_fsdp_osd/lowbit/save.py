"""State that is quantized in blocks, on its way into a checkpoint: one rank's, then all ranks'."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.tensor import DTensor

from dcp_fsdp_osd.errors import LayoutError, listed
from dcp_fsdp_osd.layout.flat import ParamKind, ParamLayout, Piece
from dcp_fsdp_osd.layout.geometry import Box
from dcp_fsdp_osd.lowbit.blocks import (
    CODES,
    PLAIN,
    SCALE,
    Quantized,
    interval,
    local_part,
    split,
)
from dcp_fsdp_osd.tree import Path

__all__ = ["QuantizedEntries", "QuantizedReport", "agree_on_quantized", "quantized_entries"]

QuantizedReport = dict[str, tuple[Quantized, tuple[int, int] | None]]
"""One rank's quantized state of one optimizer: key of the state (``optim.state.<fqn>.exp_avg``) ->
``how`` and ``interval`` of its entries."""


@dataclass(frozen=True)
class QuantizedEntries:
    """One quantized value as plain tensors of a checkpoint.

    Attributes:
        how: how it is quantized; with the layout's signature if it is state of this part alone.
        interval: the elements of the parameter that it is of, in whole blocks; None if it is state
            of this part alone, all of it in ``plain`` then.
        plain, pieces: by name below the value, as ``SaveEntries`` has them.
    """

    how: Quantized
    interval: tuple[int, int] | None
    plain: dict[str, torch.Tensor]
    pieces: dict[str, tuple[tuple[int, ...], torch.Tensor, list[Piece]]]


def quantized_entries(
    param: ParamLayout, path: Path, value: torch.Tensor, name: str
) -> QuantizedEntries:
    """The tensors of a quantized value.

    Intervals of ``codes`` and ``scale`` where the rank's part is one of whole blocks; else all of
    them as state of this part alone.

    Args:
        path: below the parameter's state.
        name: of the value, for messages.

    Raises:
        LayoutError: ``value`` is some other tensor subclass, or not cut as its parameter is.
    """
    cut_alike = param.kind is (ParamKind.DTENSOR if isinstance(value, DTensor) else ParamKind.WHOLE)
    parts = split(value, param, path) if cut_alike else None
    part = interval(param) if cut_alike else None
    local = local_part(value)
    if parts is None or (part is not None and part[1] - part[0] != local.numel()):
        raise LayoutError(
            f"{name}: expected a plain tensor, or one that is quantized in blocks as "
            f"torchao's are and cut like its parameter by FSDP2, found a {type(local).__name__} "
            f"of a parameter of kind {param.kind.value!r}: a load would give back plain tensors in "
            f"its place. Save an optimizer whose state are plain tensors, or use fully_shard"
        )
    how, inner = parts
    if part is None or part[0] % how.block_size or part[1] % how.block_size:
        how = dataclasses.replace(how, signature=param.signature)
        return QuantizedEntries(how, None, dict(inner), {})
    first, stop = (element // how.block_size for element in part)
    plain: dict[str, torch.Tensor] = {}
    pieces: dict[str, tuple[tuple[int, ...], torch.Tensor, list[Piece]]] = {}
    for key, tensor in inner.items():
        if key not in (CODES, SCALE):
            plain[key] = tensor
            continue
        each = how.packed if key == CODES else 1
        size = (math.prod(how.shape) // how.block_size * each,)
        box = Box((first * each,), ((stop - first) * each,))
        pieces[key] = (size, tensor, [Piece(box, 0)])
    return QuantizedEntries(how, part, plain, pieces)


def agree_on_quantized(
    key: str, reports: Sequence[QuantizedReport], plans: list[SavePlan]
) -> tuple[list[Quantized], list[dict[str, str]]]:
    """Bring together what ranks quantize and what some of them keep as it is.

    A rank quantizes its part or not by its size (torchao: if it has at least 4096 elements, in
    whole blocks), so the last of a parameter's ranks may have an unquantized part. Its item
    is changed to one of ``<state>.plain``, and items of parts without elements are dropped.

    Args:
        plans: changed in place.

    Returns:
        How each state is saved; and for each rank: key to write -> key of the tensor on the rank.

    Raises:
        LayoutError: ranks hold one state in different ways that do not fit together.
    """
    states = {name: how for report in reports for name, (how, _) in report.items()}
    renamed: list[dict[str, str]] = [{} for _ in plans]
    problems = _unlike(states, reports)
    stops = dict.fromkeys(states, 0)  # one past the last element that is in blocks
    for report in reports:
        for name, (_, part) in report.items():
            stops[name] = max(stops[name], part[1] if part is not None else 0)
    for rank, plan in enumerate(plans):
        items: list[WriteItem] = []
        mappings: dict[str, Path] = dict(plan.planner_data)
        for item in plan.items:
            data, name = item.tensor_data, item.index.fqn
            above, _, last = name.rpartition(".")
            if data is not None and last in (CODES, SCALE) and stops.get(above):
                items.append(_cut(item, data, states[above], stops[above]))
            elif data is None or name not in states:
                items.append(item)
            elif math.prod(data.chunk.sizes):
                plain = _plain_item(item, data, stops[name])
                if plain is None:
                    problems.append(f"{name}: unquantized on rank {rank}, but not after all blocks")
                    continue
                items.append(plain)
                renamed[rank][plain.index.fqn] = name
                mappings[plain.index.fqn] = (*mappings[name], PLAIN)
        for name in states:
            mappings.pop(name, None)
        plans[rank] = dataclasses.replace(plan, items=items, planner_data=mappings)
    if problems:
        raise LayoutError(
            f"{key}: expected each state to be quantized alike on all ranks (but for the last "
            f"elements of a parameter), found:\n  "
            + listed(problems)
            + "\nUse a block_size that divides what each rank holds, or shard these parameters "
            "otherwise"
        )
    return list(dict.fromkeys(how for r in reports for how, _ in r.values())), renamed


def _unlike(states: Mapping[str, Quantized], reports: Sequence[QuantizedReport]) -> list[str]:
    """A line for each state that ranks hold in blocks of different kinds."""
    lines = []
    for name in states:
        kinds: dict[tuple[Quantized, bool], list[int]] = {}
        for rank, report in enumerate(reports):
            if name in report:
                how, part = report[name]
                kind = dataclasses.replace(how, signature=""), part is not None
                kinds.setdefault(kind, []).append(rank)
        if len(kinds) > 1:
            each = [
                f"{how.describe()}, {'whole ones' if whole else 'cut otherwise'}, on ranks {ranks}"
                for (how, whole), ranks in kinds.items()
            ]
            lines.append(f"{name}: {'; '.join(each)}")
    return lines


def _cut(item: WriteItem, data: TensorWriteData, how: Quantized, stop: int) -> WriteItem:
    """``item`` of ``codes`` or ``scale`` of all elements as one of the first ``stop``."""
    each = how.packed if item.index.fqn.endswith(CODES) else 1
    size = torch.Size([stop // how.block_size * each])
    return dataclasses.replace(item, tensor_data=dataclasses.replace(data, size=size))


def _plain_item(item: WriteItem, data: TensorWriteData, first: int) -> WriteItem | None:
    """``item`` of a part after element ``first`` as one of the 1-D rest; None for other parts."""
    shape, offsets, sizes = data.size, data.chunk.offsets, data.chunk.sizes
    rows = len(shape) > 0 and sizes[1:] == shape[1:]
    row = math.prod(shape[1:])
    start = offsets[0] * row - first if rows else -1
    if start < 0 or not first:
        return None
    chunk = ChunkStorageMetadata(torch.Size([start]), torch.Size([sizes[0] * row]))
    size = torch.Size([math.prod(shape) - first])
    return dataclasses.replace(
        item,
        index=MetadataIndex(f"{item.index.fqn}.{PLAIN}", chunk.offsets),
        type=WriteItemType.SHARD,
        tensor_data=dataclasses.replace(data, chunk=chunk, size=size),
    )
