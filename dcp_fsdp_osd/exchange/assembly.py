"""Each rank's part of a schedule: from drafts of messages to what is read, sent and kept where.

Pure: no IO, no process group.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem

from dcp_fsdp_osd.compact import numbers
from dcp_fsdp_osd.exchange.messages import Message, RankSchedule, ReadForOthers, Source
from dcp_fsdp_osd.exchange.reads import box_of
from dcp_fsdp_osd.exchange.regions import Classes, Part, Regions
from dcp_fsdp_osd.exchange.rounds import Chunk, Draft, Run
from dcp_fsdp_osd.layout.geometry import boxes_of_interval

__all__ = ["Assembly"]


@dataclass
class _Rank:
    """What is known so far of one rank's schedule."""

    rounds: list[tuple[Message, ...]] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)  # of the round that is being added
    reads: list[Part | ReadForOthers] = field(default_factory=list)
    regions: dict[int, int] = field(default_factory=dict)  # those read whole -> their reads
    chunks: dict[int, int] = field(default_factory=dict)  # alike

    def add(self, read: Part | ReadForOthers) -> int:
        self.reads.append(read)
        return len(self.reads) - 1


class Assembly:
    """Takes rounds of drafts, one after another, and gives each rank its schedule.

    Args:
        chunks: those that are read whole, into memory of their own.
        reads_parts: otherwise regions are read whole, however they are sent.
    """

    def __init__(
        self, classes: Classes, regions: Regions, chunks: Iterable[Chunk], reads_parts: bool
    ) -> None:
        self._classes, self._regions, self._reads_parts = classes, regions, reads_parts
        self._chunk_of = {chunk.number: chunk for chunk in chunks}
        self._ranks = [_Rank() for _ in classes.participants]
        most = max(len(participant.items) for participant in classes.first)
        self._whole = [Part(item) for item in range(most)]
        self._tag = 0

    def add_round(self, drafts: Iterable[Draft]) -> None:
        for draft in drafts:
            self._add(draft)
        for rank in self._ranks:
            rank.rounds.append(tuple(rank.messages))
            rank.messages.clear()

    def _add(self, draft: Draft) -> None:
        """One message, as each of its members sees it."""
        class_of, root = self._classes.class_of, draft.root
        wanted_by = draft.stream.classes
        direct = class_of[root] in wanted_by and not draft.stream.whole
        cuda, objects = draft.stream.cuda and direct, draft.stream.objects
        head = draft.members, root, self._tag, draft.nbytes, cuda, objects
        self._tag += 1
        parts = {number: self._parts(draft.run, k, number) for k, number in enumerate(wanted_by)}
        needs: Sequence[int]
        sources: Sequence[Source] = ()
        if direct and self._reads_parts and not draft.stream.objects:
            # What is sent lies where it was read to, as in most messages of a large job.
            reads = self._ranks[root].reads
            needs = range(len(reads), len(reads) + len(parts[class_of[root]]))
            reads += parts[class_of[root]]
        else:
            sources = self._sources(draft, direct)
            needs = tuple(dict.fromkeys(source.read for source in sources))
        seen_by = {number: Message(*head, found) for number, found in parts.items()}
        nothing = Message(*head)
        for n in draft.members:
            mine = seen_by.get(class_of[n], nothing)
            if n == root:
                mine = Message(*head, mine.parts, tuple(needs), () if direct else tuple(sources))
            self._ranks[n].messages.append(mine)

    def _parts(self, run: Run, k: int, number: int) -> tuple[Part, ...]:
        """Where a message belongs in the reads of one class, the ``k``-th of its owners."""
        reads, regions = self._classes.reads, self._regions
        rows = regions.owners[regions.begins[run.region] + k]
        items = (rows - reads.begins[number]).tolist()
        whole = run.stop - run.start == regions.numel[run.region]
        whole &= (regions.sizes[run.region] == reads.sizes[rows]).all(1)
        if whole.all():
            return tuple(map(self._whole.__getitem__, items))
        found: list[Part] = []
        each = zip(items, rows.tolist(), run, whole.tolist(), strict=True)
        for item, row, (region, start, stop), is_whole in each:
            if is_whole:
                found.append(self._whole[item])
                continue
            box = regions.box(region)
            read = box_of(reads.within[row], reads.sizes[row])
            base = [a - b for a, b in zip(box.offsets, read.offsets, strict=True)]
            for inner in boxes_of_interval(box.sizes, start, stop):
                if inner.sizes == read.sizes:
                    found.append(self._whole[item])
                else:
                    found.append(Part(item, inner.shifted(base).offsets, inner.sizes))
        return tuple(found)

    def _sources(self, draft: Draft, direct: bool) -> list[Source]:
        """Have the root read what a message consists of.

        Args:
            direct: it is read to where the root wants it itself.
        """
        rank, classes = self._ranks[draft.root], draft.stream.classes
        number = self._classes.class_of[draft.root] if direct else classes[0]
        k = classes.index(number)
        found: list[Source] = []
        for region, start, stop in draft.run:
            if draft.stream.whole:
                found += self._from_chunk(rank, region, start, stop)
            elif self._regions.objects[region] or not self._reads_parts:
                found += self._from_region(rank, (region, start, stop), k, number, direct)
            else:
                one = Run(self._regions, *(np.array([n]) for n in (region, start, stop)))
                for part in self._parts(one, k, number):
                    found.append(Source(rank.add(self._read(part, region, number, direct))))
        return found

    def _from_region(
        self, rank: _Rank, piece: tuple[int, int, int], k: int, number: int, direct: bool
    ) -> Iterator[Source]:
        """Of a region that is read whole, once for all of its messages."""
        region, start, stop = piece
        if region not in rank.regions:
            (part,) = self._parts(Run.of(self._regions, np.array([region])), k, number)
            rank.regions[region] = rank.add(self._read(part, region, number, direct))
        read = rank.regions[region]
        if self._regions.objects[region]:
            yield Source(read)
        else:
            boxes = boxes_of_interval(self._regions.box(region).sizes, start, stop)
            yield from (Source(read, box.offsets, box.sizes) for box in boxes)

    def _from_chunk(self, rank: _Rank, region: int, start: int, stop: int) -> Iterator[Source]:
        """Of a chunk that is read whole, once for all of its regions."""
        regions = self._regions
        chunk = self._chunk_of[int(regions.chunk[region])]
        if chunk.number not in rank.chunks:
            number, item = self._classes.item(int(regions.owners[regions.begins[region]]))
            whole = dataclasses.replace(
                self._classes.first[number].items[item],
                dest_offsets=torch.Size([0] * len(chunk.box.sizes)),
                storage_offsets=torch.Size(chunk.box.offsets),
                lengths=torch.Size(chunk.box.sizes),
            )
            read_for = ReadForOthers(_renamed(whole), regions.dtype_of(region))
            rank.chunks[chunk.number] = rank.add(read_for)
        read = rank.chunks[chunk.number]
        own = regions.box(region)
        base = [a - b for a, b in zip(own.offsets, chunk.box.offsets, strict=True)]
        for box in boxes_of_interval(own.sizes, start, stop):
            yield Source(read, box.shifted(base).offsets, box.sizes)

    def _read(self, part: Part, region: int, number: int, direct: bool) -> Part | ReadForOthers:
        if direct:
            return part
        item = part.of(self._classes.first[number].items)
        return ReadForOthers(_renamed(item), self._regions.dtype_of(region))

    def schedules(self, alone: npt.NDArray[np.bool_]) -> tuple[RankSchedule, ...]:
        """Each rank's, when all rounds are added.

        Args:
            alone: regions that are not exchanged, of all.
        """
        participants, class_of = self._classes.participants, self._classes.class_of
        ranks = numbers([participant.rank for participant in participants])
        parts = _alone(self._classes, self._regions, alone)
        return tuple(
            RankSchedule(n, ranks, tuple(rank.rounds), parts[class_of[n]], tuple(rank.reads))
            for n, rank in enumerate(self._ranks)
        )


def _renamed(item: ReadItem) -> ReadItem:
    """``item`` under a name that tells it from the rank's own reads."""
    index = item.dest_index
    return dataclasses.replace(
        item, dest_index=MetadataIndex(f"{index.fqn} (for others)", index.offset)
    )


def _alone(
    classes: Classes, regions: Regions, alone: npt.NDArray[np.bool_]
) -> list[dict[int, tuple[Part, ...]]]:
    """For each class, the parts that it reads for itself of reads of which something is exchanged.

    A region that a class wants twice is exchanged once, and read alone for the second time.
    """
    reads = classes.reads
    owned = np.repeat(np.arange(len(regions)), regions.counts)
    rows = regions.owners[~alone[owned]]
    exchanged = np.zeros(len(reads.plan), bool)
    exchanged[rows] = True
    rows = rows[reads.plan[rows].argsort(kind="stable")]
    edges = reads.plan[rows].searchsorted(np.arange(len(classes.members) + 1))
    found: list[dict[int, tuple[Part, ...]]] = [
        dict.fromkeys((rows[a:b] - begin).tolist(), ())
        for (a, b), begin in zip(itertools.pairwise(edges.tolist()), reads.begins, strict=False)
    ]
    # What is exchanged and wanted again, then what is alone, each in file order.
    region = np.concatenate((regions.again, owned[alone[owned]]))
    row = np.concatenate((regions.more, regions.owners[alone[owned]]))
    those = exchanged[row] & ~regions.objects[region]
    order = np.lexsort((row[those], region[those], alone[region[those]]))
    parts: dict[int, list[Part]] = {}
    for k, n in zip(region[those][order].tolist(), row[those][order].tolist(), strict=True):
        box = regions.box(k)
        base = [-at for at in box_of(reads.within[n], reads.sizes[n]).offsets]
        part = Part(classes.item(n)[1], box.shifted(base).offsets, box.sizes)
        parts.setdefault(n, []).append(part)
    for n, each in parts.items():
        number, item = classes.item(n)
        found[number][item] = tuple(each)
    return found
