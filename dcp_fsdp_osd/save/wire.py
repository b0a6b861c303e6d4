"""Local plans on their way to the coordinator, and its answers: what repeats is sent once.

Two things make plans large. Boxes: but those of one tensor on one rank are one interval of its
elements, from which they follow (:func:`~dcp_fsdp_osd.layout.geometry.boxes_of_interval`), so that
an interval is sent. And names: but ranks that hold parts of the same parameters have the same, so
that all of it that such ranks have alike, the *common* part, is made of the same bytes on all of
them, and the coordinator reads it once (:class:`Sent`).

An answer is the numbers of the entries that a rank is to write; it has the entries.

Items are recognized by value as they are pickled. What a subclass, or a storage writer, made of a
plan is sent as it is.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import operator
import pickle
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from dcp_fsdp_osd.compact import (
    Lazy,
    dump_strings,
    joined,
    load_strings,
    no_collections,
    packed,
    parted,
    unpacked,
)
from dcp_fsdp_osd.errors import LayoutError
from dcp_fsdp_osd.layout.geometry import boxes_of_interval
from dcp_fsdp_osd.save.report import GroupInfo, Report
from dcp_fsdp_osd.tree import Path

__all__ = [
    "AnswerPlan",
    "Common",
    "Entry",
    "KeptEntries",
    "LocalData",
    "Outline",
    "Own",
    "Run",
    "Sent",
    "SentPlan",
    "entries_of",
]

DIGEST = 8
"""Bytes of one digest."""
_WINDOW = 1 << 15  # as far as zlib looks back


class Run(NamedTuple):
    """Items of one tensor whose boxes are one interval of its elements, in their order."""

    key: str
    size: torch.Size
    properties: TensorProperties


Entry = Run | WriteItem


def _items(run: Run, start: int, stop: int) -> list[WriteItem]:
    found = []
    for box in boxes_of_interval(run.size, start, stop):
        offsets, sizes = torch.Size(box.offsets), torch.Size(box.sizes)
        data = TensorWriteData(ChunkStorageMetadata(offsets, sizes), run.properties, run.size)
        index = MetadataIndex(run.key, offsets)
        found.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
    return found


def _run_of(items: Sequence[WriteItem]) -> tuple[Run, int, int] | None:
    """The interval that ``items`` of one key are, if they are one."""
    data = items[0].tensor_data
    if data is None or len(data.chunk.offsets) != len(data.size):
        return None
    start = 0
    for offset, size in zip(data.chunk.offsets, data.size, strict=True):
        start = start * size + offset
    numels = [math.prod(each.tensor_data.chunk.sizes) for each in items if each.tensor_data]
    stop = start + sum(numels)
    if not 0 <= start <= stop <= math.prod(data.size):
        return None
    run = Run(items[0].index.fqn, data.size, data.properties)
    same = all(each.index.index is None for each in items) and _items(run, start, stop) == [*items]
    return (run, start, stop) if same else None


def entries_of(items: Sequence[WriteItem]) -> Iterator[tuple[Entry, Sequence[WriteItem], int, int]]:
    """``items`` as entries, each with its items, and its interval (0, 0 if it is no run)."""
    at = 0
    while at < len(items):
        item, end = items[at], at + 1
        if item.type == WriteItemType.SHARD:
            name = item.index.fqn
            while end < len(items) and items[end].index.fqn == name:
                end += 1
            run = _run_of(items[at:end])
            if run is not None:
                yield run[0], items[at:end], run[1], run[2]
                at = end
                continue
            end = at + 1
        yield item, (item,), 0, 0
        at = end


@dataclass
class LocalData:
    """``planner_data`` of a local plan.

    Attributes:
        mappings: DCP's: key -> path in the state dict.
        reports: of optimizers and models, by key.
        others: key of what is no optimizer's and no model's -> digest.
        of_models: likewise, of models.
        proposed: the items, as the planner has them; does not travel.
        outline: of the plan with these items, once it has been made; does not travel.
    """

    mappings: dict[str, Path]
    reports: dict[str, Report]
    others: dict[str, str]
    of_models: dict[str, str]
    proposed: Sequence[WriteItem] = ()
    outline: Outline | None = None

    def is_proposed(self, items: Sequence[WriteItem]) -> bool:
        """Whether ``items`` are still those that the planner has."""
        return len(items) == len(self.proposed) and all(map(operator.is_, items, self.proposed))

    def digests(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """What is compared between ranks, by what it is compared with; always in this order.

        Those of replicas, which have names of the rank's own, come last.
        """
        for name, value in self.others.items():
            yield ("other", name), value
        for name, value in self.of_models.items():
            yield ("of model", name), value
        for key, report in self.reports.items():
            for name, value in report.scalars.items():
                yield ("scalar", key, name), value
            for group in report.groups:
                for name, value in group.options.items():
                    yield ("option", key, name), value
        for key, report in self.reports.items():
            for name, value in report.replicas.items():
                yield ("replica", key, name), value

    def with_digests(self, digests: Iterator[str]) -> LocalData:
        """A copy, down to what planning changes, with other digests, in the order of
        :meth:`digests`."""

        def replaced(values: Any) -> dict[str, str]:
            return {name: next(digests) for name in values}

        others, of_models = replaced(self.others), replaced(self.of_models)
        reports = {
            key: dataclasses.replace(
                report,
                scalars=replaced(report.scalars),
                groups=[GroupInfo(g.fqns, replaced(g.options)) for g in report.groups],
                pieces=dict(report.pieces),
                info=dataclasses.replace(report.info, opaque=dict(report.info.opaque)),
            )
            for key, report in self.reports.items()
        }
        for report in reports.values():
            report.replicas = replaced(report.replicas)
        return LocalData(dict(self.mappings), reports, others, of_models)


def _without_own(data: LocalData) -> LocalData:
    """``data`` with nothing in it that ranks of one shape have different."""
    reports = {
        key: dataclasses.replace(
            report,
            signature="",
            shard_groups=dict.fromkeys(report.shard_groups, 0),
            stateless={fqn: [] for fqn in report.stateless},
            replicas={},
        )
        for key, report in data.reports.items()
    }
    names = dataclasses.replace(data, reports=reports, proposed=(), outline=None)
    return names.with_digests(iter([""] * sum(1 for _ in names.digests())))


class Common(NamedTuple):
    """What ranks of one shape have alike.

    Attributes:
        data: without what is a rank's own, and with empty texts for digests.
        strings: that are in these two, as they travelled.
    """

    entries: list[Entry]
    data: LocalData
    strings: bytes


class OwnReport(NamedTuple):
    """What of a report is a rank's own; values are of the names in the common part, in order."""

    signature: str
    shard_groups: array[int]
    stateless: list[list[tuple[int, int]]]
    replicas: list[str]


class Own(NamedTuple):
    """What is a rank's own.

    Attributes:
        intervals: start and stop of each run.
        reports: of each report.
        proposed: the entries are those that the rank's planner has.
    """

    intervals: array[int]
    reports: list[OwnReport]
    proposed: bool


def _digests(data: LocalData) -> bytes:
    return bytes.fromhex("".join(value for _, value in data.digests()))


@dataclass(frozen=True)
class Outline:
    """A local plan, taken apart.

    Attributes:
        common, strings: :class:`Common`, pickled.
        own: :class:`Own`, pickled.
        digests: one after the other, as of :meth:`LocalData.digests`.
        key: the hash of all but digests.
    """

    common: bytes
    strings: str
    own: bytes
    digests: bytes
    key: bytes

    @classmethod
    def of(cls, plan: SavePlan) -> Outline:
        """Of a plan with :class:`LocalData`."""
        data: LocalData = plan.planner_data
        proposed = data.is_proposed(plan.items)
        if data.outline is not None and proposed:
            return data.outline
        entries: list[Entry] = []
        intervals = array("q")
        for entry, _, start, stop in entries_of(plan.items):
            entries.append(entry)
            if isinstance(entry, Run):
                intervals.extend((start, stop))
        own = Own(
            intervals,
            [
                OwnReport(
                    report.signature,
                    array("q", report.shard_groups.values()),
                    list(report.stateless.values()),
                    list(report.replicas),
                )
                for report in data.reports.values()
            ],
            proposed,
        )
        common, strings = dump_strings((entries, _without_own(data)))
        texts = common, strings.encode(), pickle.dumps(own, protocol=5)
        key = b"".join(hashlib.blake2b(text).digest() for text in texts)
        return cls(common, strings, texts[-1], _digests(data), key)

    def with_digests(self, data: LocalData) -> Outline:
        """Of the plan with ``data``, which differs in digests."""
        return dataclasses.replace(self, digests=_digests(data))

    def sent(self) -> Sent:
        own = _with_help(self.own, self.strings.encode())
        return Sent(joined(self.common, self.strings), own, zlib.compress(self.digests, 6))


@dataclass(frozen=True)
class Sent:
    """A local plan as it travels; ranks of one shape have equal ``common``.

    Attributes:
        common, own, digests: those of :class:`Outline`, compressed; ``own`` with the help of the
            strings of ``common``.
    """

    common: bytes
    own: bytes
    digests: bytes

    def read_common(self) -> Common:
        found, strings = parted(self.common)
        with no_collections():
            entries, data = load_strings(found, strings.decode())
        return Common(entries, data, strings)

    def read_own(self, common: Common) -> Own:
        helped = zlib.decompressobj(zdict=common.strings[-_WINDOW:])
        found: Own = pickle.loads(helped.decompress(self.own))
        return found

    def with_own(self, common: Common, own: Own) -> Sent:
        """The plan of another rank of the same shape."""
        text = _with_help(pickle.dumps(own, protocol=5), common.strings)
        return dataclasses.replace(self, own=text)

    def read_digests(self) -> bytes:
        return zlib.decompress(self.digests)

    def data(self, common: Common, own: Own) -> LocalData:
        """All of it; a copy, down to what planning changes."""
        reports = {}
        for (key, report), mine in zip(common.data.reports.items(), own.reports, strict=True):
            reports[key] = dataclasses.replace(
                report,
                signature=mine.signature,
                shard_groups=dict(zip(report.shard_groups, mine.shard_groups, strict=True)),
                stateless=dict(zip(report.stateless, mine.stateless, strict=True)),
                replicas=dict.fromkeys(mine.replicas, ""),
            )
        text = self.read_digests().hex()
        digests = (text[at : at + 2 * DIGEST] for at in range(0, len(text), 2 * DIGEST))
        return dataclasses.replace(common.data, reports=reports).with_digests(digests)

    def items(self, common: Common, own: Own) -> list[list[WriteItem]]:
        """Of each entry."""
        at = iter(own.intervals)
        return [
            _items(entry, next(at), next(at)) if isinstance(entry, Run) else [entry]
            for entry in common.entries
        ]

    def plan(self) -> SavePlan:
        """The local plan, with :class:`LocalData`."""
        common = self.read_common()
        own = self.read_own(common)
        items = [item for each in self.items(common, own) for item in each]
        return SavePlan(items, planner_data=self.data(common, own))


def _with_help(data: bytes, strings: bytes) -> bytes:
    helped = zlib.compressobj(9, zdict=strings[-_WINDOW:])
    return helped.compress(data) + helped.flush()


class SentPlan(SavePlan):
    """A local plan with :class:`LocalData` that is pickled as :class:`Sent`.

    Unpickled, its ``planner_data`` is a :class:`Sent`, and its items are made when they are asked
    for.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        sent = self.planner_data
        if isinstance(sent, LocalData):
            sent = Outline.of(self).sent()
        elif not isinstance(sent, Sent):  # somebody else's now
            return SavePlan, (list(self.items), self.storage_data, sent)
        return _received, (sent.common, sent.own, sent.digests, self.storage_data)


def _received(common: bytes, own: bytes, digests: bytes, storage_data: Any) -> SentPlan:
    sent = Sent(common, own, digests)
    items: Any = Lazy(lambda: sent.plan().items)
    return SentPlan(items, storage_data, sent)


@dataclass(frozen=True)
class KeptEntries:
    """Entries of a rank's plan that it is to write.

    Attributes:
        entries: their numbers.
        hints: of each: of a run, the number of its first box among the tensor's; of a whole tensor
            0, of an object -1, for none.
    """

    entries: array[int]
    hints: array[int]

    def of(self, entries: Sequence[Sequence[WriteItem]]) -> list[WriteItem]:
        found: list[WriteItem] = []
        for entry, hint in zip(self.entries, self.hints, strict=True):
            items = entries[entry]
            if hint < 0:
                found += items
                continue
            for number, item in enumerate(items, hint):
                index = MetadataIndex(item.index.fqn, item.index.offset, number)
                found.append(dataclasses.replace(item, index=index))
        return found


class AnswerPlan(SavePlan):
    """A rank's share of the global plan, of which :class:`KeptEntries` travels, and no items.

    What others have made of the items since is sent as it is.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        items = None if isinstance(self.items, Lazy) else list(self.items)
        return _answered, (packed((items, self.storage_data, self.planner_data)),)


def _answered(data: bytes) -> SavePlan:
    items, storage_data, planner_data = unpacked(data)
    found: Any = Lazy(_not_yet) if items is None else items
    return AnswerPlan(found, storage_data, planner_data)


def _not_yet() -> list[WriteItem]:
    raise LayoutError(
        "expected FlatOptimSavePlanner.finish_plan to be called before the items of its plan are "
        "looked at, which it puts in: call super().finish_plan(plan) first"
    )
