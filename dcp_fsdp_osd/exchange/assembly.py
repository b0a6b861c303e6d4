"""Each rank's part of a schedule: from drafts of messages to what is read, sent and kept where.

Pure: no IO, no process group.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem

from dcp_fsdp_osd.compact import numbers
from dcp_fsdp_osd.exchange.messages import Message, RankSchedule, ReadForOthers, Source
from dcp_fsdp_osd.exchange.regions import Classes, Part, Region
from dcp_fsdp_osd.exchange.rounds import Chunk, Draft, RegionSlice
from dcp_fsdp_osd.layout.geometry import boxes_of_interval

__all__ = ["Assembly"]


@dataclass
class _Rank:
    """What is known so far of one rank's schedule."""

    rounds: list[tuple[Message, ...]] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)  # of the round that is being added
    reads: list[Part | ReadForOthers] = field(default_factory=list)
    whole: dict[object, int] = field(default_factory=dict)  # what is read whole -> its read

    def add(self, read: Part | ReadForOthers) -> int:
        self.reads.append(read)
        return len(self.reads) - 1


class Assembly:
    """Takes rounds of drafts, one after another, and gives each rank its schedule.

    Args:
        chunks: those that are read whole, into memory of their own.
        reads_parts: otherwise regions are read whole, however they are sent.
    """

    def __init__(self, classes: Classes, chunks: Iterable[Chunk], reads_parts: bool) -> None:
        self._classes, self._reads_parts = classes, reads_parts
        self._chunk_of = {chunk.key: chunk for chunk in chunks}
        self._ranks = [_Rank() for _ in classes.participants]
        self._whole = [Part(item) for item in range(max(map(len, classes.wants), default=0))]
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
        wanted_by = [number for number, _ in draft.slices[0].region.owners]
        direct = class_of[root] in wanted_by and not draft.stream.whole
        message = Message(
            draft.members,
            root,
            self._tag,
            draft.nbytes,
            draft.stream.cuda and direct,
            draft.stream.objects,
        )
        self._tag += 1
        parts = {number: tuple(self._parts(draft.slices, number)) for number in wanted_by}
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
        seen_by = {
            number: dataclasses.replace(message, parts=found) for number, found in parts.items()
        }
        for n in draft.members:
            mine = seen_by.get(class_of[n], message)
            if n == root:
                kept = () if direct else tuple(sources)
                mine = dataclasses.replace(mine, needs=tuple(needs), sources=kept)
            self._ranks[n].messages.append(mine)

    def _parts(self, slices: Iterable[RegionSlice], number: int) -> Iterator[Part]:
        """Where a message belongs in the reads of one class."""
        those = self._classes.wants[number]
        for region, start, stop in slices:
            item = region.item_of(number)
            box = region.box
            if box is None:
                yield self._whole[item]
                continue
            _, _, within, sizes = those[item]
            if box.sizes == sizes and stop - start == region.numel:
                yield self._whole[item]
                continue
            assert within is not None
            base = [a - b for a, b in zip(box.offsets, within, strict=True)]
            for inner in boxes_of_interval(box.sizes, start, stop):
                if inner.sizes == sizes:
                    yield self._whole[item]
                else:
                    yield Part(item, inner.shifted(base).offsets, inner.sizes)

    def _sources(self, draft: Draft, direct: bool) -> list[Source]:
        """Have the root read what a message consists of.

        Args:
            direct: it is read to where the root wants it itself.
        """
        rank = self._ranks[draft.root]
        found: list[Source] = []
        for each in draft.slices:
            region = each.region
            number = self._classes.class_of[draft.root] if direct else region.owners[0][0]
            if draft.stream.whole:
                found += self._from_chunk(rank, each, number)
            elif region.box is None or not self._reads_parts:
                found += self._from_region(rank, each, number, direct)
            else:
                for part in self._parts([each], number):
                    found.append(Source(rank.add(self._read(part, region, number, direct))))
        return found

    def _from_region(
        self, rank: _Rank, each: RegionSlice, number: int, direct: bool
    ) -> Iterator[Source]:
        """Of a region that is read whole, once for all of its messages."""
        region = each.region
        if id(region) not in rank.whole:
            (part,) = self._parts([RegionSlice(region, 0, region.numel)], number)
            rank.whole[id(region)] = rank.add(self._read(part, region, number, direct))
        read = rank.whole[id(region)]
        if region.box is None:
            yield Source(read)
        else:
            yield from (Source(read, box.offsets, box.sizes) for box in each.boxes())

    def _from_chunk(self, rank: _Rank, each: RegionSlice, number: int) -> Iterator[Source]:
        """Of a chunk that is read whole, once for all of its regions."""
        region = each.region
        assert region.box is not None
        chunk = self._chunk_of[region.chunk_key]
        if chunk.key not in rank.whole:
            item = self._classes.first[number].items[region.item_of(number)]
            whole = dataclasses.replace(
                item,
                dest_offsets=torch.Size([0] * len(chunk.box.sizes)),
                storage_offsets=torch.Size(chunk.box.offsets),
                lengths=torch.Size(chunk.box.sizes),
            )
            rank.whole[chunk.key] = rank.add(ReadForOthers(_renamed(whole), region.dtype))
        read = rank.whole[chunk.key]
        base = [a - b for a, b in zip(region.box.offsets, chunk.box.offsets, strict=True)]
        for box in each.boxes():
            yield Source(read, box.shifted(base).offsets, box.sizes)

    def _read(self, part: Part, region: Region, number: int, direct: bool) -> Part | ReadForOthers:
        if direct:
            return part
        item = part.of(self._classes.first[number].items)
        return ReadForOthers(_renamed(item), region.dtype)

    def schedules(
        self, exchanged: Iterable[Region], alone: Iterable[Region]
    ) -> tuple[RankSchedule, ...]:
        """Each rank's, when all rounds are added: all regions are exchanged, or read alone."""
        participants, class_of = self._classes.participants, self._classes.class_of
        ranks = numbers([participant.rank for participant in participants])
        parts = _alone(self._classes, exchanged, alone)
        return tuple(
            RankSchedule(
                n, ranks, tuple(rank.rounds), parts.get(class_of[n], {}), tuple(rank.reads)
            )
            for n, rank in enumerate(self._ranks)
        )


def _renamed(item: ReadItem) -> ReadItem:
    """``item`` under a name that tells it from the rank's own reads."""
    index = item.dest_index
    return dataclasses.replace(
        item, dest_index=MetadataIndex(f"{index.fqn} (for others)", index.offset)
    )


def _alone(
    classes: Classes, exchanged: Iterable[Region], alone: Iterable[Region]
) -> dict[int, dict[int, tuple[Part, ...]]]:
    """For each class, the parts that it reads for itself of reads of which something is exchanged.

    A region that a class wants twice is exchanged once, and read alone for the second time.
    """
    found: dict[int, dict[int, list[Part]]] = {number: {} for number in range(len(classes.members))}
    by_itself: list[tuple[Region, Sequence[tuple[int, int]]]] = []
    for region in exchanged:
        for number, item in region.owners:
            if item not in found[number]:
                found[number][item] = []
        if region.again:
            by_itself.append((region, region.again))
    by_itself += [(region, (*region.owners, *region.again)) for region in alone]
    for region, owners in by_itself:
        for number, item in owners:
            parts = found.get(number, {}).get(item)
            if parts is None or region.box is None:
                continue
            base = [-at for at in classes.wants[number][item][2] or ()]
            parts.append(Part(item, region.box.shifted(base).offsets, region.box.sizes))
    return {
        number: {item: tuple(parts) for item, parts in items.items()}
        for number, items in found.items()
    }
