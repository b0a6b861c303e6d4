"""The global plan of ranks of a few shapes that together hold each element, in about linear time.

Most jobs are *regular*: what is cut is cut into intervals that tile its tensors, and what is not is
the same on all ranks that have it. Then names are agreed on by one rank of each shape (equal
:attr:`~dcp_fsdp_osd.save.wire.Sent.common`), boxes by sorting intervals, which shows that they
neither overlap nor leave anything out, and DCP's default planner plans the rest. Anything else is
left to the general way, item by item, which has the words for what is wrong, too.

The result is that of the general way, but that of equal intervals on several ranks one rank writes
all boxes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from array import array
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from dcp_fsdp_osd.checkpoint import SavedInfo
from dcp_fsdp_osd.errors import LayoutError
from dcp_fsdp_osd.layout.intervals import Intervals, Tiling, chunks_of_intervals
from dcp_fsdp_osd.save.agree import item_bytes
from dcp_fsdp_osd.save.consensus import agree
from dcp_fsdp_osd.save.groups import merge_groups
from dcp_fsdp_osd.save.per_rank import differing
from dcp_fsdp_osd.save.replicas import differing_replicas
from dcp_fsdp_osd.save.report import Report, Share
from dcp_fsdp_osd.save.wire import Common, KeptEntries, LocalData, Run
from dcp_fsdp_osd.save.world import World
from dcp_fsdp_osd.tree import Path

__all__ = ["DefaultPlan", "Regular", "plan_regular"]

SMALL = 1024
"""Bytes up to which what several ranks have is written by the lowest of them."""

DefaultPlan = Callable[[list[SavePlan]], tuple[list[SavePlan], Metadata]]


class _IrregularError(Exception):
    """Left to the general way."""


@dataclass(frozen=True)
class Regular:
    """A global plan.

    Attributes:
        kept, shares: by rank.
        infos: what is recorded, by key of the optimizer.
    """

    kept: list[KeptEntries]
    shares: list[Share]
    metadata: Metadata
    infos: dict[str, SavedInfo]


def plan_regular(world: World, default: DefaultPlan, *, to_lowest: bool) -> Regular | None:
    """The global plan; None where ``world`` is not regular.

    Args:
        default: DCP's global plan, of what is not cut.
        to_lowest: of what several ranks have the lowest writes all.
    """
    try:
        runs = _Runs(world)
        names = _Names(world, runs)
        return _planned(world, runs, names, default, to_lowest=to_lowest)
    except _IrregularError:
        return None


class _Runs:
    """The runs of all ranks, in rows.

    Attributes:
        tensors: what they are of.
        shapes: for each of the world's common parts: number of the tensor and of the entry of each
            of its runs.
        rows: in the order of ranks and their entries.
        entries: of each row, its number in the rank's plan.
        firsts: by rank: its first row; and at the end, how many there are.
        tiling: how they make up the tensors.
    """

    def __init__(self, world: World) -> None:
        self.tensors: list[Run] = []
        numbers: dict[str, int] = {}
        self.shapes = [self._of(common, numbers) for common in world.commons]
        counts = [len(self.shapes[shape][0]) for shape in world.shape]
        self.firsts = [0, *torch.cumsum(torch.tensor(counts), 0).tolist()]
        intervals = array("q")
        for own in world.own:
            intervals.extend(own.intervals)
        empty = torch.empty((0, 2), dtype=torch.int64)
        both = torch.frombuffer(intervals, dtype=torch.int64).view(-1, 2) if intervals else empty
        self.rows = Intervals(
            torch.cat([self.shapes[shape][0] for shape in world.shape]),
            both[:, 0].clone(),
            both[:, 1].clone(),
            torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)),
        )
        self.entries = torch.cat([self.shapes[shape][1] for shape in world.shape])
        numels = torch.tensor([math.prod(each.size) for each in self.tensors], dtype=torch.int64)
        tiling = self.rows.tiling(numels)
        if tiling is None:
            raise _IrregularError
        self.tiling: Tiling = tiling

    def _of(self, common: Common, numbers: dict[str, int]) -> tuple[torch.Tensor, torch.Tensor]:
        found, entries = [], []
        for at, entry in enumerate(common.entries):
            if isinstance(entry, WriteItem):
                if entry.type == WriteItemType.SHARD:
                    raise _IrregularError
                continue
            number = numbers.setdefault(entry.key, len(self.tensors))
            if number == len(self.tensors):
                self.tensors.append(entry)
            elif self.tensors[number] != entry:
                raise _IrregularError
            found.append(number)
            entries.append(at)
        return torch.tensor(found, dtype=torch.int64), torch.tensor(entries, dtype=torch.int64)


class _Names:
    """All that has names, as one rank of each kind has it, agreed on.

    Attributes:
        items: of each kind: what is not cut, by the number of the entry.
        shares: of each kind's lowest rank; others have none.
        mappings: merged.
        infos: what is recorded.
    """

    def __init__(self, world: World, runs: _Runs) -> None:
        samples = world.samples()
        cut = {run.key for run in runs.tensors}
        plans: list[SavePlan] = []
        numbers: list[dict[str, int]] = []
        for (first, _), data in zip(world.kinds, samples, strict=True):
            entries = world.commons[world.shape[first]].entries
            whole = {at: e for at, e in enumerate(entries) if isinstance(e, WriteItem)}
            if any(item.index.fqn in cut for item in whole.values()):
                raise _IrregularError
            plans.append(SavePlan(list(whole.values()), planner_data=data.mappings))
            numbers.append({item.index.fqn: at for at, item in whole.items()})
        self.shares = [Share() for _ in samples]
        self.infos: dict[str, SavedInfo] = {}
        for key in dict.fromkeys(key for data in samples for key in data.reports):
            self._agree(key, world, samples, plans)
        for share in self.shares:
            if share.zeros or any(new != old for new, old in share.renamed.items()):
                raise _IrregularError
        self.items = [
            {number[item.index.fqn]: item for item in plan.items}
            for number, plan in zip(numbers, plans, strict=True)
        ]
        self.mappings = self._merged(world, plans)

    def _agree(
        self, key: str, world: World, samples: Sequence[LocalData], plans: list[SavePlan]
    ) -> None:
        reports = [data.reports.get(key, Report()) for data in samples]
        pieces = {fqn for report in reports for fqn in report.pieces.values()}
        for report in reports:
            if report.parts or report.quantized or report.per_rank_of or report.empties:
                raise _IrregularError
            if not pieces.isdisjoint(report.stateless):
                raise _IrregularError
        try:
            merged = merge_groups([r.groups for r in reports], key, [r.signature for r in reports])
            per_rank = any(group.varying for group in merged) or differing(key, reports)
            if per_rank or differing_replicas(self._replicas(key, world)):
                raise _IrregularError
            info = agree(key, reports, plans, self.shares, tiled=True)
        except LayoutError:
            raise _IrregularError from None
        if info is None:
            return
        if info.opaque or info.stateless:
            raise _IrregularError
        if info.layouts is not None and not any(report.model for report in reports):
            info = dataclasses.replace(info, layouts=sorted(self._signatures(key, world)))
        self.infos[key] = info

    @staticmethod
    def _replicas(key: str, world: World) -> list[Mapping[str, str]]:
        """By rank, where a rank has any."""
        found: list[Mapping[str, str]] = []
        for rank, own in enumerate(world.own):
            if any(each.replicas for each in own.reports):
                report = world.data(rank).reports.get(key)
                found.append(report.replicas if report is not None else {})
        return found

    @staticmethod
    def _signatures(key: str, world: World) -> set[str]:
        found = set()
        places = [list(common.data.reports) for common in world.commons]
        for shape, own in zip(world.shape, world.own, strict=True):
            keys = places[shape]
            found.add(own.reports[keys.index(key)].signature if key in keys else "")
        return found

    @staticmethod
    def _merged(world: World, plans: Sequence[SavePlan]) -> dict[str, Path]:
        """As DCP merges them: keys of the last rank first, and the first rank's paths."""
        turns: list[tuple[int, Mapping[str, Path]]] = []
        for (first, last), plan in zip(world.kinds, plans, strict=True):
            turns.append((first, plan.planner_data))
            if last != first:
                written = {item.index.fqn for item in plan.items}
                common = world.commons[world.shape[first]].data
                groups = tuple(
                    f"{key}.param_groups."
                    for key, report in common.reports.items()
                    if not report.model
                )
                without = {
                    key: path
                    for key, path in plan.planner_data.items()
                    if not (key in written and key.startswith(groups))
                }
                turns.append((last, without))
        merged: dict[str, Path] = {}
        for _, mappings in sorted(turns, key=lambda turn: -turn[0]):
            merged.update(mappings)
        for _, mappings in sorted(turns, key=lambda turn: -turn[0]):
            merged.update(mappings)
        return merged


def _planned(
    world: World, runs: _Runs, names: _Names, default: DefaultPlan, *, to_lowest: bool
) -> Regular:
    count = len(world.sent)
    kept_rows, whole = _shared_out(world, runs, names, to_lowest=to_lowest)
    plans = [SavePlan([], planner_data={}) for _ in range(count)]
    for rank, entries in whole.items():
        plans[rank] = SavePlan(list(entries.values()), planner_data={})
    planned, metadata = default(plans)
    if not all(map(_as_expected, plans, planned)):
        raise _IrregularError
    rows = torch.where(kept_rows)[0]
    tensors = runs.rows.tensors[rows]
    by_tensor = torch.argsort(tensors, stable=True)
    hints = torch.empty(len(rows), dtype=torch.int64)
    found, places = _tensors(runs, rows[by_tensor], hints, by_tensor)
    for rank, entries in whole.items():
        for at, item in entries.items():
            places.append((rank, at, item.index.fqn))
    stored = {**metadata.state_dict_metadata, **found}
    contents = {key: stored[key] for _, _, key in sorted(places)}
    if len(contents) != len(stored):
        raise _IrregularError
    kept = _kept(world, runs, rows, hints, whole)
    shares = [Share() for _ in range(count)]
    for (first, _), share in zip(world.kinds, names.shares, strict=True):
        shares[first] = share
    metadata = dataclasses.replace(
        metadata, state_dict_metadata=contents, planner_data=names.mappings
    )
    return Regular(kept, shares, metadata, names.infos)


def _shared_out(
    world: World, runs: _Runs, names: _Names, *, to_lowest: bool
) -> tuple[torch.Tensor, dict[int, dict[int, WriteItem]]]:
    """Which rows are written; and what of the rest, by rank and number of the entry.

    As ``share_out`` does it: largest first, to the rank with the fewest bytes so far.
    """
    rows, tiling = runs.rows, runs.tiling
    itemsizes = torch.tensor(
        [run.properties.dtype.itemsize for run in runs.tensors], dtype=torch.int64
    )
    nbytes = (rows.stops - rows.starts) * itemsizes[rows.tensors]
    kept = torch.zeros(len(rows.tensors), dtype=torch.bool)
    alone = tiling.order[tiling.first[tiling.counts == 1]]
    kept[alone] = True
    load = torch.zeros(len(world.sent), dtype=torch.int64)
    load.index_add_(0, rows.ranks[alone], nbytes[alone])
    loads: list[int] = load.tolist()
    members: dict[int, list[int]] = defaultdict(list)
    for rank, kind in enumerate(world.kind):
        members[kind].append(rank)
    offers: dict[str, list[tuple[int, int, WriteItem]]] = defaultdict(list)
    for kind, items in enumerate(names.items):
        for at, item in items.items():
            offers[item.index.fqn].append((kind, at, item))
    options = {key for share in names.shares for key in share.renamed}  # of the lowest of a kind
    whole: dict[int, dict[int, WriteItem]] = defaultdict(dict)
    shared: list[tuple[int, str, int, int]] = []
    for key, those in offers.items():
        size = item_bytes(those[0][2])
        if key in options or (len(those) == 1 and len(members[those[0][0]]) == 1):
            kind, at, item = those[0]
            whole[world.kinds[kind][0]][at] = item
            loads[world.kinds[kind][0]] += size
        else:
            shared.append((-size, key, 0, -1))
    several = torch.where(tiling.counts > 1)[0]
    those_rows = tiling.order[tiling.first[several]]
    for group, tensor, start, size in zip(
        several.tolist(),
        rows.tensors[those_rows].tolist(),
        rows.starts[those_rows].tolist(),
        nbytes[those_rows].tolist(),
        strict=True,
    ):
        shared.append((-size, runs.tensors[tensor].key, start, group))
    firsts, counts = tiling.first.tolist(), tiling.counts.tolist()
    order, ranks = tiling.order.tolist(), rows.ranks.tolist()
    for minus, key, _, group in sorted(shared):
        small = to_lowest or -minus <= SMALL
        if group < 0:
            places = [
                (rank, at, item)
                for kind, at, item in offers[key]
                for rank in (members[kind][:1] if small else members[kind])
            ]
            rank, at, item = min(
                places, key=lambda place: (0 if small else loads[place[0]], place[0])
            )
            whole[rank][at] = item
        else:
            equal = order[firsts[group] : firsts[group] + counts[group]]
            row = equal[0] if small else min(equal, key=lambda r: (loads[ranks[r]], ranks[r]))
            kept[row] = True
            rank = ranks[row]
        loads[rank] -= minus
    return kept, {rank: dict(sorted(whole[rank].items())) for rank in sorted(whole)}


def _as_expected(plan: SavePlan, planned: SavePlan) -> bool:
    """Whether DCP left a plan of whole tensors and objects as it is, but for hints."""
    return [(item, _hint(item)) for item in plan.items] == [
        (item, -1 if item.index.index is None else item.index.index) for item in planned.items
    ]


def _hint(item: WriteItem) -> int:
    return -1 if item.type == WriteItemType.BYTE_IO else 0


def _tensors(
    runs: _Runs, rows: torch.Tensor, hints: torch.Tensor, places: torch.Tensor
) -> tuple[dict[str, TensorStorageMetadata], list[tuple[int, int, str]]]:
    """The metadata of what is cut; and where each is first written: rank, entry, and key.

    Args:
        rows: that are written, by tensor, and in the order of ranks and entries.
        hints: filled: of each row, at ``places``, the number of its first box.
    """
    found: dict[str, TensorStorageMetadata] = {}
    first_of: list[tuple[int, int, str]] = []
    # Parameters of equal layers are cut alike, and so is all state of one.
    known: dict[object, tuple[list[ChunkStorageMetadata], list[int]]] = {}
    starts, stops = runs.rows.starts[rows].tolist(), runs.rows.stops[rows].tolist()
    counts = torch.bincount(runs.rows.tensors[rows], minlength=len(runs.tensors)).tolist()
    begins = [0, *itertools.accumulate(counts)]
    firsts = rows[torch.tensor(begins[:-1], dtype=torch.int64)]
    ranks, entries = runs.rows.ranks[firsts].tolist(), runs.entries[firsts].tolist()
    all_hints: list[int] = []
    for number, run in enumerate(runs.tensors):
        low, high = begins[number], begins[number + 1]
        key = run.size, tuple(starts[low:high]), tuple(stops[low:high])
        if key not in known:
            known[key] = chunks_of_intervals(*key)
        chunks, numbers = known[key]
        found[run.key] = TensorStorageMetadata(run.properties, run.size, list(chunks))
        first_of.append((ranks[number], entries[number], run.key))
        all_hints += numbers
    hints[places] = torch.tensor(all_hints, dtype=torch.int64)
    return found, first_of


def _kept(
    world: World,
    runs: _Runs,
    rows: torch.Tensor,
    hints: torch.Tensor,
    whole: Mapping[int, Mapping[int, WriteItem]],
) -> list[KeptEntries]:
    """What each rank is to write, of ``rows`` and of the rest."""
    entries, numbers = runs.entries[rows].tolist(), hints.tolist()
    count = len(world.sent)
    counts = torch.bincount(runs.rows.ranks[rows], minlength=count).tolist()
    begins = [0, *itertools.accumulate(counts)]
    found = []
    for rank in range(count):
        low, high = begins[rank], begins[rank + 1]
        pairs = list(zip(entries[low:high], numbers[low:high], strict=True))
        if rank in whole:
            pairs = sorted([*pairs, *((at, _hint(item)) for at, item in whole[rank].items())])
        found.append(
            KeptEntries(
                array("q", [at for at, _ in pairs]), array("q", [hint for _, hint in pairs])
            )
        )
    return found
