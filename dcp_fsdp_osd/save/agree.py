"""What all ranks of a save agree on: scalars, holes, and who writes what.  Pure."""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from dcp_fsdp_osd.containers import Containers
from dcp_fsdp_osd.errors import LayoutError, listed, several
from dcp_fsdp_osd.layout.flat import Segment
from dcp_fsdp_osd.layout.geometry import Box
from dcp_fsdp_osd.save.report import Report

__all__ = [
    "agree_on_containers",
    "check_others",
    "complement",
    "drop_overlaps",
    "fill_holes",
    "find_holes",
    "item_bytes",
    "share_out",
    "tensor_data",
]

_ZEROS_AT_ONCE = 4 * 1024 * 1024  # elements of a box of zeros: bounds what resolve_data allocates


def tensor_data(item: WriteItem) -> TensorWriteData:
    if item.tensor_data is None:
        raise LayoutError(f"{item.index.fqn}: expected a tensor item, found one without its data")
    return item.tensor_data


def check_others(
    others: Sequence[Mapping[str, str]], of_models: Sequence[Mapping[str, str]]
) -> None:
    """Look for values that are no optimizer's, and differ between ranks: one rank's are saved.

    Of models they are warned of: ranks of DDP have batch statistics of their own in every job.

    Args:
        others, of_models: by rank: key -> digest.

    Raises:
        LayoutError: values that are no model's differ.
    """
    differ = _that_differ(others)
    if differ:
        raise LayoutError(
            f"expected each value under one key to be the same on all ranks, because one rank's is "
            f"saved and a load gives it to all; found that {several(differ)} differ. Put what is a "
            f"rank's own under a key of its own, such as f'rng_{{rank}}', save one value of what "
            f"all are to have, or name the key of a model's state dict in model_key="
        )
    differ = _that_differ(of_models)
    if differ:
        warnings.warn(
            f"{len(differ)} values of models differ between ranks and are saved from one rank, "
            f"which a load gives to all: {several(differ)}",
            stacklevel=2,
        )


def _that_differ(digests: Sequence[Mapping[str, str]]) -> list[str]:
    found: dict[str, set[str]] = defaultdict(set)
    for of_rank in digests:
        for name, value in of_rank.items():
            found[name].add(value)
    return sorted(name for name, values in found.items() if len(values) > 1)


def agree_on_containers(key: str, all_of: Sequence[Containers]) -> Containers:
    """The mappings of all ranks.

    Raises:
        LayoutError: ranks have different mappings, or keys, in one place.
    """
    agreed = Containers()
    for rank, containers in enumerate(all_of):
        for path, each in containers.items():
            joined = agreed.setdefault(path, each).joined(each)
            if joined is None:
                raise LayoutError(
                    f"{key}: expected the same keys on every rank, found for "
                    f"{'.'.join(map(str, path)) or key} a {agreed[path].kind} with keys "
                    f"{list(agreed[path].keys)[:10]}, and on rank {rank} a {each.kind} with "
                    f"{list(each.keys)[:10]}"
                )
            agreed[path] = joined
    return agreed


def drop_overlaps(reports: Sequence[Report], plans: list[SavePlan]) -> None:
    """Let one of several FSDP groups write a tensor that they cut at different places.

    Where tensor parallelism leaves groups different numbers of elements, their flat tensors end at
    different places, also within parameters that all of the groups have.
    """
    if not any(report.parts for report in reports):
        return
    spans: dict[str, dict[int, set[tuple[int, int]]]] = defaultdict(lambda: defaultdict(set))
    for report, plan in zip(reports, plans, strict=True):
        for item in plan.items:
            fqn = report.pieces.get(item.index.fqn)
            if fqn is not None and fqn in report.shard_groups and fqn not in report.parts:
                data = tensor_data(item)
                whole = Box((0,) * len(data.size), tuple(data.size))
                span = _interval(_box(data), whole, report.orders.get(fqn))
                spans[item.index.fqn][report.shard_groups[fqn]].add(span)
    writer: dict[str, int] = {}
    for name, shard_groups in spans.items():
        distinct = sorted(set().union(*shard_groups.values()))
        if any(a[1] > b[0] for a, b in itertools.pairwise(distinct)):
            held = {group: sum(b - a for a, b in found) for group, found in shard_groups.items()}
            writer[name] = max(held, key=lambda group: (held[group], -group))
    for rank, (report, plan) in enumerate(zip(reports, plans, strict=True)):
        items = [
            item
            for item in plan.items
            if item.index.fqn not in writer
            or report.shard_groups[report.pieces[item.index.fqn]] == writer[item.index.fqn]
        ]
        plans[rank] = dataclasses.replace(plan, items=items)


@dataclass(frozen=True)
class Hole:
    """Elements of a tensor of which no rank has a value.

    Attributes:
        key: of the tensor.
        sample: any item's data of it.
        excused: whether ranks hold them that have no state of the parameter.
    """

    key: str
    segment: Segment
    sample: TensorWriteData
    excused: bool

    def __str__(self) -> str:
        of = f" of {self.segment.within}" if self.segment.within else ""
        return f"{self.key}[{self.segment.start}:{self.segment.stop}]{of}"

    def span(self) -> list[Any]:
        """As in ``SavedInfo.absent``."""
        box = self.segment.within
        where = [] if box is None else [list(box.offsets), list(box.sizes)]
        return [self.segment.start, self.segment.stop, *where]


def find_holes(
    reports: Sequence[Report], plans: Sequence[SavePlan]
) -> tuple[list[Hole], list[str]]:
    """Elements that are in no rank's items; and, in words, boxes that tensor parallelism cut out
    and no rank holds any of."""
    fqns = {key: fqn for report in reports for key, fqn in report.pieces.items()}
    orders = {fqn: order for report in reports for fqn, order in report.orders.items()}
    boxes: dict[str, dict[tuple[int, ...], TensorWriteData]] = {key: {} for key in fqns}
    for plan in plans:
        for item in plan.items:
            if item.index.fqn in boxes:
                boxes[item.index.fqn][tuple(item.index.offset or ())] = tensor_data(item)
    parts_of: dict[str, set[Box]] = defaultdict(set)
    stateless: dict[str, list[tuple[Box | None, tuple[int, int]]]] = defaultdict(list)
    for report in reports:
        for fqn, box in report.parts.items():
            parts_of[fqn].add(box)
        for fqn, spans in report.stateless.items():
            stateless[fqn] += [(report.parts.get(fqn), span) for span in spans]
    holes: list[Hole] = []
    uncovered: list[str] = []
    for key, fqn in fqns.items():
        sample = next(iter(boxes[key].values()), None)
        if sample is None:  # somebody has taken them out of the plans
            uncovered.append(f"{key}: all of it")
            continue
        shape, order = tuple(sample.size), orders.get(fqn)
        parts = parts_of.get(fqn) or {Box((0,) * len(shape), shape)}
        if sum(part.numel for part in parts) < math.prod(shape):
            uncovered.append(f"{key}: all of {shape} but {', '.join(sorted(map(str, parts)))}")
        for part in parts:
            held = [
                _interval(box, part, order)
                for box in map(_box, boxes[key].values())
                if box.overlap(part) is not None
            ]
            excuses = [span for box, span in stateless[fqn] if (box or part) == part]
            within = part if part.sizes != shape else None
            for start, stop in complement(held, part.numel):
                segment = Segment(fqn, shape, start, stop, 0, order, within)
                excused = not complement(excuses, stop, start)
                holes.append(Hole(key, segment, sample, excused))
    return holes, uncovered


def fill_holes(
    key: str, reports: Sequence[Report], plans: list[SavePlan]
) -> tuple[dict[str, list[Any]], set[MetadataIndex]]:
    """Have rank 0 write zeros for elements whose rank has no state while others do.

    FSDP with ``use_orig_params=True`` gives a parameter no gradient on ranks whose forward did
    not use it. Which elements those are is returned (key -> spans as in ``SavedInfo.absent``), so
    that the same layout loads "no state" again; and the items of zeros. Changes ``plans``.

    Raises:
        LayoutError: no rank that takes part holds some elements.
    """
    holes, uncovered = find_holes(reports, plans)
    lost = uncovered + [str(hole) for hole in holes if not hole.excused]
    if lost:
        raise LayoutError(
            f"{key}: expected every element on a rank that takes part in the save, found none "
            f"that holds:\n  " + listed(lost) + "\nCall dcp.save on all ranks of the FSDP "
            "process group, with collectives; or a rank lacks this state but has other state of "
            "the same parameter"
        )
    absent: dict[str, list[Any]] = {}
    for hole in holes:
        absent.setdefault(hole.key, []).append(hole.span())
    if holes:
        warnings.warn(
            f"{key}: some ranks have no state for parts of "
            f"{sorted({hole.segment.fqn for hole in holes})} while others do (no gradient there); "
            f"zeros are saved for those parts",
            stacklevel=2,
        )
    zeros = [item for hole in holes for item in _zeros(hole.key, hole.sample, hole.segment)]
    plans[0] = dataclasses.replace(plans[0], items=[*plans[0].items, *zeros])
    return absent, {item.index for item in zeros}


def _zeros(name: str, sample: TensorWriteData, hole: Segment) -> Iterator[WriteItem]:
    """Items that write ``hole`` as zeros, in boxes of bounded size."""
    for at in range(hole.start, hole.stop, _ZEROS_AT_ONCE):
        stop = min(hole.stop, at + _ZEROS_AT_ONCE)
        for piece in dataclasses.replace(hole, start=at, stop=stop).pieces():
            offsets, sizes = torch.Size(piece.box.offsets), torch.Size(piece.box.sizes)
            yield WriteItem(
                MetadataIndex(name, offsets),
                WriteItemType.SHARD,
                tensor_data=dataclasses.replace(sample, chunk=ChunkStorageMetadata(offsets, sizes)),
            )


def _box(data: TensorWriteData) -> Box:
    return Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))


def _interval(box: Box, part: Box, order: tuple[int, ...] | None) -> tuple[int, int]:
    """The elements of ``part`` in a box of it that is contiguous in memory order."""
    start = 0
    for d in order if order is not None else range(len(part.sizes)):
        start = start * part.sizes[d] + box.offsets[d] - part.offsets[d]
    return start, start + box.numel


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
            size.setdefault(item.index, item_bytes(item))
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


def item_bytes(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 0
    data = item.tensor_data
    return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize
