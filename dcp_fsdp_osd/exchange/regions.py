"""Which bytes of a checkpoint several ranks want alike.  Pure: no IO, no process group.

Every rank's reads are boxes of saved chunks.  Here the boxes of all ranks are cut into *regions*:
the largest boxes that each are wanted by one fixed set of ranks.  Regions that are wanted by more
than one rank can be read once and broadcast; see :mod:`dcp_fsdp_osd.exchange.schedule`.

Ranks with the same reads (all of a DDP job) form one *class*, so that planning costs time by
what there is to read and not by how many ranks want it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from dcp_fsdp_osd.compact import Numbers, numbers
from dcp_fsdp_osd.exchange.reads import item_key, wants
from dcp_fsdp_osd.layout.geometry import Box
from dcp_fsdp_osd.storage.places import Places

__all__ = ["Classes", "Part", "Participant", "Region", "find_regions", "narrowed"]

Owner = tuple[int, int]
"""A class, and the number of an item among its reads."""


@dataclass(frozen=True)
class Participant:
    """One rank of a load, as far as others need to know it.

    Attributes:
        rank: its global rank, for messages to people.
        host: the machine that it runs on.
        can_read: whether its storage reader can read.
        items: its reads, in the order of :func:`~dcp_fsdp_osd.exchange.reads.in_order`.
        dtypes: of the destination of each item; None where the item is no tensor.
        cuda: for each item, whether its destination is on a CUDA device.
        digest: equal for ranks with equal items, dtypes and cuda.
    """

    rank: int
    host: str
    can_read: bool
    items: Sequence[ReadItem]
    dtypes: tuple[torch.dtype | None, ...]
    cuda: tuple[bool, ...]
    digest: bytes

    @staticmethod
    def digest_of(
        items: Sequence[ReadItem], dtypes: Sequence[torch.dtype | None], cuda: Sequence[bool]
    ) -> bytes:
        """Of the values alone: a pickle would also show which of them are one object."""
        found = hashlib.sha256()
        for item, dtype, on_gpu in zip(items, dtypes, cuda, strict=True):
            found.update(repr((item_key(item), str(dtype), on_gpu)).encode())
        return found.digest()


@dataclass(frozen=True)
class Part:
    """A box of one read of a rank, relative to that read's own box; None: all of it.

    ``item`` is the read's number in the order of :func:`~dcp_fsdp_osd.exchange.reads.in_order`,
    which rank and coordinator come to alike.
    """

    item: int
    offsets: tuple[int, ...] | None = None
    sizes: tuple[int, ...] | None = None

    def of(self, items: Sequence[ReadItem]) -> ReadItem:
        item = items[self.item]
        if self.offsets is None or self.sizes is None:
            return item
        return narrowed(item, self.offsets, self.sizes)


@dataclass(slots=True)
class Region:
    """A box of a saved chunk (or a saved object) that one fixed set of ranks wants.  Not changed.

    Attributes:
        where: file and offset of the chunk, by which reads are ordered.
        chunk: FQN and offsets of the saved chunk.
        box: in the chunk; None for an object.
        dtype: that it is read in; None for an object.
        cuda: all destinations are on CUDA devices.
        owners: who wants it, each class once, ascending.
        again: further items of these classes that want it too, for a second destination.
        numel: elements; 1 for an object.
        itemsize: bytes of an element; 0 for an object, whose size is not known yet.
        nbytes: of all elements.
    """

    where: tuple[str, int]
    chunk: tuple[str, tuple[int, ...]]
    box: Box | None
    dtype: torch.dtype | None
    cuda: bool
    owners: tuple[Owner, ...]
    again: tuple[Owner, ...] = ()
    numel: int = field(init=False)
    itemsize: int = field(init=False)
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        # Asked for again and again, for each of a million regions.
        self.numel = 1 if self.box is None else math.prod(self.box.sizes)
        self.itemsize = 0 if self.dtype is None else self.dtype.itemsize
        self.nbytes = self.numel * self.itemsize

    @property
    def chunk_key(self) -> tuple[object, ...]:
        """Equal for regions that one read of a whole chunk has all of."""
        return self.chunk, self.dtype

    def item_of(self, number: int) -> int:
        """The item by which class ``number`` wants it."""
        if len(self.owners) == 1:
            return self.owners[0][1]
        return self.owners[bisect_left(self.owners, (number, -1))][1]


class Classes:
    """Ranks with the same reads, as one.

    Attributes:
        participants: all ranks.
        members: numbers of the participants in each class, ascending.
        first: one participant of each class.
        wants: what each of its items reads, for each class.
        class_of: the class of each participant, by number.
    """

    def __init__(self, participants: Sequence[Participant]) -> None:
        self.participants = participants
        of_digest: dict[bytes, list[int]] = {}
        for n, participant in enumerate(participants):
            of_digest.setdefault(participant.digest, []).append(n)
        self.members = list(of_digest.values())
        self.first = [participants[those[0]] for those in self.members]
        self.wants = [wants(participant.items) for participant in self.first]
        self.class_of = {n: number for number, those in enumerate(self.members) for n in those}
        self._wanting: dict[tuple[int, ...], Numbers] = {}

    def wanting(self, region: Region) -> Numbers:
        """The participants that want a region, ascending: one value for all with the same."""
        classes = tuple(number for number, _ in region.owners)
        if classes not in self._wanting:
            those = sorted(n for number in classes for n in self.members[number])
            self._wanting[classes] = numbers(those)
        return self._wanting[classes]

    def count(self, region: Region) -> int:
        """How many participants want it."""
        return len(self.wanting(region))


def narrowed(item: ReadItem, offsets: Sequence[int], sizes: Sequence[int]) -> ReadItem:
    """The read of a box within the box that ``item`` reads."""
    return dataclasses.replace(
        item,
        dest_offsets=torch.Size(a + b for a, b in zip(item.dest_offsets, offsets, strict=True)),
        storage_offsets=torch.Size(
            a + b for a, b in zip(item.storage_offsets, offsets, strict=True)
        ),
        lengths=torch.Size(sizes),
    )


_Wanted = tuple[Box, list[Owner]]  # a box, and who wants it
_ChunkKey = tuple[str, tuple[int, ...], torch.dtype | None]  # objects have no dtype
_Bounds = tuple[tuple[int, ...], tuple[int, ...]] | None  # offsets and sizes of a box


def find_regions(classes: Classes, metadata: Metadata) -> list[Region]:
    """The regions of everything that ``classes`` read, in file order.

    Boxes without elements are in no region.
    """
    chunks = _boxes_of_chunks(classes)
    places = _places(metadata, chunks)
    names = {dtype: str(dtype) for _, _, dtype in chunks}
    cuda_of = [participant.cuda for participant in classes.first]
    found: list[tuple[Any, ...]] = []
    for ((fqn, offset, dtype), boxes), at in zip(chunks.items(), places, strict=True):
        chunk, name = (fqn, offset), names[dtype]
        for box, owners in _cut(boxes):
            if len(owners) == 1:
                ((number, item),) = owners
                region = Region(at, chunk, box, dtype, cuda_of[number][item], (owners[0],))
            else:
                first: dict[int, int] = {}
                again = []
                for number, item in sorted(owners):
                    if first.setdefault(number, item) != item:
                        again.append((number, item))
                cuda = all(cuda_of[number][item] for number, item in first.items())
                region = Region(at, chunk, box, dtype, cuda, tuple(first.items()), tuple(again))
            within = () if box is None else box.offsets
            found.append((*at, fqn, offset, within, name, len(found), region))
    found.sort()  # no two are alike up to their number
    return [each[-1] for each in found]


def _boxes_of_chunks(classes: Classes) -> dict[_ChunkKey, dict[_Bounds, list[Owner]]]:
    """What of each saved chunk is read in each dtype, and by whom; objects have neither."""
    chunks: dict[_ChunkKey, dict[_Bounds, list[Owner]]] = {}
    for number, (participant, those) in enumerate(zip(classes.first, classes.wants, strict=True)):
        each = zip(those, participant.dtypes, strict=True)
        for item, ((fqn, offset, within, sizes), dtype) in enumerate(each):
            if 0 in sizes and within is not None:
                continue
            key = (fqn, offset, None if within is None else dtype)
            box = None if within is None else (within, sizes)
            boxes = chunks.get(key)
            if boxes is None:
                chunks[key] = {box: [(number, item)]}
            else:
                boxes.setdefault(box, []).append((number, item))
    return chunks


def _places(
    metadata: Metadata, chunks: dict[_ChunkKey, dict[_Bounds, list[Owner]]]
) -> list[tuple[str, int]]:
    """File and offset of each of ``chunks``, where the storage writer's metadata have them."""
    wanted: dict[str, tuple[list[int], list[tuple[int, ...] | None]]] = {}
    for number, ((fqn, offset, _), boxes) in enumerate(chunks.items()):
        if fqn not in wanted:
            wanted[fqn] = [], []
        numbers, offsets = wanted[fqn]
        numbers.append(number)
        offsets.append(None if None in boxes else offset)
    found = [("", 0)] * len(chunks)
    data = metadata.storage_data
    if isinstance(data, Places):  # what is asked for, and not all there is
        for fqn, (numbers, offsets) in wanted.items():
            for number, place in zip(numbers, data.located(fqn, offsets), strict=True):
                found[number] = place or ("", 0)
        return found
    places: dict[tuple[str, tuple[int, ...]], tuple[str, int]] = {}
    for index, info in data.items() if isinstance(data, dict) else ():
        file, at = getattr(info, "relative_path", ""), getattr(info, "offset", 0)
        if index.fqn in wanted and isinstance(file, str) and isinstance(at, int):
            places[index.fqn, tuple(index.offset or ())] = (file, at)
    for fqn, (numbers, offsets) in wanted.items():
        for number, at_chunk in zip(numbers, offsets, strict=True):
            found[number] = places.get((fqn, at_chunk or ()), ("", 0))
    return found


def _cut(boxes: dict[_Bounds, list[Owner]]) -> list[tuple[Box | None, list[Owner]]]:
    """Disjoint boxes of a chunk, each with all who want it."""
    known = [(bounds and Box(*bounds), owners) for bounds, owners in boxes.items()]
    if len(known) == 1:
        return known
    those = [(box, owners) for box, owners in known if box is not None]
    return [each for cluster in _clusters(those) for each in _disjoint(cluster)]


def _clusters(boxes: list[_Wanted]) -> Iterator[list[_Wanted]]:
    """Groups of boxes such that boxes of different groups have nothing in common.

    Boxes are parted along one dimension after another, until none parts any more of them.
    """
    todo = [(boxes, 0, 0)]  # with the next dimension, and how many in a row parted none
    while todo:
        group, d, useless = todo.pop()
        dims = len(group[0][0].offsets)
        if len(group) == 1 or useless == dims:
            yield sorted(group, key=lambda pair: (pair[0].offsets, pair[0].sizes))
            continue
        groups = _apart(group, d)
        useless = useless + 1 if len(groups) == 1 else 1
        todo += [(each, (d + 1) % dims, useless) for each in groups]


def _apart(boxes: list[_Wanted], d: int) -> list[list[_Wanted]]:
    """Groups of boxes that have nothing in common along dimension ``d``."""
    groups: list[list[_Wanted]] = []
    end = -1
    for pair in sorted(boxes, key=lambda pair: pair[0].offsets[d]):
        if pair[0].offsets[d] >= end:
            groups.append([])
        groups[-1].append(pair)
        end = max(end, pair[0].offsets[d] + pair[0].sizes[d])
    return groups


def _disjoint(boxes: list[_Wanted]) -> list[_Wanted]:
    """Cut boxes that may overlap into boxes that do not."""
    done: list[_Wanted] = []
    todo = list(reversed(boxes))
    while todo:
        box, owners = todo.pop()
        for k, (other, theirs) in enumerate(done):
            common = box.overlap(other)
            if common is None:
                continue
            done[k] = (common, [*theirs, *owners])
            done += [(rest, theirs) for rest in _without(other, common)]
            todo += [(rest, owners) for rest in _without(box, common)]
            break
        else:
            done.append((box, owners))
    return done


def _without(box: Box, hole: Box) -> list[Box]:
    """``box`` without ``hole``, which lies in it, as at most ``2 N`` boxes."""
    rest: list[Box] = []
    offsets, sizes = list(box.offsets), list(box.sizes)
    for d in range(len(offsets)):
        before = hole.offsets[d] - offsets[d]
        after = offsets[d] + sizes[d] - hole.offsets[d] - hole.sizes[d]
        if before:
            rest.append(Box(tuple(offsets), (*sizes[:d], before, *sizes[d + 1 :])))
        if after:
            at = (*offsets[:d], hole.offsets[d] + hole.sizes[d], *offsets[d + 1 :])
            rest.append(Box(at, (*sizes[:d], after, *sizes[d + 1 :])))
        offsets[d], sizes[d] = hole.offsets[d], hole.sizes[d]
    return rest
