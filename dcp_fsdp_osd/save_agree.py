"""What all ranks of a save agree on: scalars, holes, and who writes what.  Pure."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from .errors import LayoutError
from .layout import Segment
from .optim_state import GroupInfo

__all__ = [
    "Report",
    "check_kinds",
    "check_scalars",
    "complement",
    "fill_holes",
    "share_out",
    "tensor_data",
]

_ZEROS_AT_ONCE = 4 * 1024 * 1024  # elements of a box of zeros: bounds what resolve_data allocates


@dataclass
class Report:
    """What a rank tells the coordinator of one optimizer (travels with its local plan)."""

    pieces: dict[str, str] = field(default_factory=dict)  # key -> FQN
    stateless: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    orders: dict[str, tuple[int, ...]] = field(default_factory=dict)
    groups: list[GroupInfo] = field(default_factory=list)
    user: list[str] = field(default_factory=list)
    opaque: dict[str, str] = field(default_factory=dict)
    opaque_of: list[str] = field(default_factory=list)
    odd: list[str] = field(default_factory=list)
    int_keys: list[list[str]] = field(default_factory=list)
    scalars: dict[str, str] = field(default_factory=dict)  # key -> digest


def tensor_data(item: WriteItem) -> TensorWriteData:
    if item.tensor_data is None:
        raise LayoutError(f"{item.index.fqn}: expected a tensor item, found one without its data")
    return item.tensor_data


def check_scalars(key: str, reports: Sequence[Report]) -> None:
    values: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, report in enumerate(reports):
        for name, value in report.scalars.items():
            values[name][value].append(rank)
    differ = [
        f"{name}: ranks " + " / ".join(str(ranks) for ranks in found.values())
        for name, found in sorted(values.items())
        if len(found) > 1
    ]
    if differ:
        raise LayoutError(
            f"{key}: expected scalar state to be the same on every rank that has it, found "
            f"{len(differ)} that differ:\n  " + "\n  ".join(differ)
        )


def check_kinds(key: str, reports: Sequence[Report]) -> None:
    """One state must be cut like its parameter on all ranks or on none."""
    cut: dict[str, list[int]] = defaultdict(list)
    other: dict[str, list[int]] = defaultdict(list)
    for rank, report in enumerate(reports):
        for name in report.pieces:
            cut[name].append(rank)
        for name in [*report.opaque_of, *report.scalars]:
            other[name].append(rank)
    mixed = [
        f"{name}: like the parameter's local piece on ranks {cut[name]}, not so on {other[name]}"
        for name in sorted(cut.keys() & other.keys())
    ]
    if mixed:
        raise LayoutError(
            f"{key}: expected state to have the shape of the local piece on all ranks or on none, "
            f"found:\n  " + "\n  ".join(mixed)
        )


def fill_holes(
    key: str, reports: Sequence[Report], plans: list[SavePlan]
) -> dict[str, list[list[int]]]:
    """Have zeros written for elements whose rank has no state while others do.

    FSDP with ``use_orig_params=True`` gives a parameter no gradient on ranks whose forward did
    not use it. Which elements those are is returned (key -> intervals), so that the same
    layout loads "no state" again.
    """
    names = {name: fqn for r in reports for name, fqn in r.pieces.items()}
    boxes: dict[str, dict[tuple[int, ...], WriteItem]] = {name: {} for name in names}
    for plan in plans:
        for item in plan.items:
            if item.index.fqn in boxes:
                boxes[item.index.fqn][tuple(item.index.offset or ())] = item
    orders = {fqn: order for r in reports for fqn, order in r.orders.items()}
    absent: dict[str, list[list[int]]] = {}
    lost: list[str] = []
    zeros: list[WriteItem] = []
    for name, fqn in names.items():
        sample = tensor_data(next(iter(boxes[name].values())))
        shape, order = tuple(sample.size), orders.get(fqn)
        held = [_interval(tensor_data(item), order) for item in boxes[name].values()]
        holes = complement(held, math.prod(shape))
        if not holes:
            continue
        excused = [span for r in reports for span in r.stateless.get(fqn, ())]
        for start, stop in holes:
            if complement(excused, stop, start):
                lost.append(f"{name}[{start}:{stop}]")
        absent[name] = [list(hole) for hole in holes]
        for start, stop in holes:
            for at in range(start, stop, _ZEROS_AT_ONCE):
                part = Segment(fqn, shape, at, min(stop, at + _ZEROS_AT_ONCE), 0, order)
                for piece in part.pieces():
                    chunk = ChunkStorageMetadata(
                        torch.Size(piece.box.offsets), torch.Size(piece.box.sizes)
                    )
                    zeros.append(
                        WriteItem(
                            MetadataIndex(name, piece.box.offsets),
                            WriteItemType.SHARD,
                            tensor_data=dataclasses.replace(sample, chunk=chunk),
                        )
                    )
    if lost:
        raise LayoutError(
            f"{key}: expected every element on a rank that takes part in the save, found none "
            f"that holds:\n  " + "\n  ".join(lost) + "\nCall dcp.save on all ranks of the FSDP "
            "process group, with collectives; or a rank lacks this state but has other state of "
            "the same parameter"
        )
    if absent:
        warnings.warn(
            f"{key}: some ranks have no state for parts of {sorted({names[n] for n in absent})} "
            f"while others do (no gradient there); zeros are saved for those parts",
            stacklevel=2,
        )
        plans[0] = dataclasses.replace(plans[0], items=[*plans[0].items, *zeros])
    return absent


def _interval(data: TensorWriteData, order: tuple[int, ...] | None) -> tuple[int, int]:
    """The elements of a box that is contiguous in memory order."""
    start = 0
    for d in order if order is not None else range(len(data.size)):
        start = start * data.size[d] + data.chunk.offsets[d]
    return start, start + math.prod(data.chunk.sizes)


def complement(
    spans: Sequence[tuple[int, int]], stop: int, start: int = 0
) -> list[tuple[int, int]]:
    """What ``spans`` leave uncovered of ``[start, stop)``."""
    holes = []
    for low, high in sorted(spans):
        if low > start:
            holes.append((start, min(low, stop)))
        start = max(start, high)
        if start >= stop:
            return holes
    return [*holes, (start, stop)] if start < stop else holes


def share_out(plans: Sequence[SavePlan], *, to_lowest: bool = False) -> list[SavePlan]:
    """Give each item that several ranks offer to one of them.  Deterministic.

    Objects and scalars go to the lowest rank that offers them, so that they lie together; boxes,
    largest first, to the rank with the fewest bytes so far (``to_lowest``: to the lowest).

    Replaces ``torch.distributed.checkpoint._dedup_save_plans``, which counts whole tensors.
    """
    offers: dict[MetadataIndex, list[int]] = defaultdict(list)
    size: dict[MetadataIndex, int] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            offers[item.index].append(rank)
            size.setdefault(item.index, _item_bytes(item))
    load = [0] * len(plans)
    owner: dict[MetadataIndex, int] = {}
    shared = []
    for index, ranks in offers.items():
        if len(ranks) == 1:
            owner[index] = ranks[0]
            load[ranks[0]] += size[index]
        else:
            shared.append(index)
    shared.sort(key=lambda i: (-size[i], i.fqn, tuple(i.offset or ())))
    for index in shared:
        small = to_lowest or size[index] <= 1024
        owner[index] = min(offers[index], key=lambda r: (0 if small else load[r], r))
        load[owner[index]] += size[index]
    return [
        dataclasses.replace(plan, items=[i for i in plan.items if owner[i.index] == rank])
        for rank, plan in enumerate(plans)
    ]


def _item_bytes(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 0
    data = item.tensor_data
    return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize
