"""Which bytes of a checkpoint several ranks want alike.  Pure: no IO, no process group.

Every rank's reads are boxes of saved chunks.  Here the boxes of all ranks are cut into *atoms*: the
largest boxes that each are wanted by one fixed set of ranks.  Atoms that are wanted by more than
one rank can be read once and handed on; see :mod:`dcp_fsdp_osd.exchange.schedule`.

Ranks with the same reads (all of a DDP job) form one *class*, so that planning costs time by
what there is to read and not by how many ranks want it.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from dcp_fsdp_osd.layout.geometry import Box

__all__ = ["Atom", "Part", "Participant", "find_atoms", "in_order", "narrowed"]


@dataclass(frozen=True)
class Participant:
    """One rank of a load, as far as others need to know it.

    Attributes:
        rank: its global rank, for messages to people.
        host: the machine that it runs on.
        can_read: whether its storage reader can read.
        items: its reads, in the order of :func:`in_order`.
        dtypes: of the destination of each item; None where the item is no tensor.
        cuda: for each item, whether its destination is on a CUDA device.
        digest: equal for ranks with equal items, dtypes and cuda.
    """

    rank: int
    host: str
    can_read: bool
    items: tuple[ReadItem, ...]
    dtypes: tuple[torch.dtype | None, ...]
    cuda: tuple[bool, ...]
    digest: bytes = b""

    @staticmethod
    def digest_of(
        items: Sequence[ReadItem], dtypes: Sequence[torch.dtype | None], cuda: Sequence[bool]
    ) -> bytes:
        """Of the values alone: a pickle would also tell which of them are one object."""
        found = hashlib.sha256()
        for item, dtype, on_gpu in zip(items, dtypes, cuda, strict=True):
            found.update(repr((item_key(item), str(dtype), on_gpu)).encode())
        return found.digest()


@dataclass(frozen=True)
class Part:
    """A box of one read of a rank, relative to that read's own box; None: all of it.

    ``item`` is the read's number in the order of :func:`in_order`, which rank and coordinator
    come to alike.
    """

    item: int
    offsets: tuple[int, ...] | None = None
    sizes: tuple[int, ...] | None = None

    def of(self, items: Sequence[ReadItem]) -> ReadItem:
        item = items[self.item]
        if self.offsets is None or self.sizes is None:
            return item
        return narrowed(item, self.offsets, self.sizes)


@dataclass(frozen=True)
class Atom:
    """A box of a saved chunk (or a saved object) that one fixed set of ranks wants.

    Attributes:
        where: file and offset of the chunk, by which reads are ordered.
        chunk: FQN and offsets of the saved chunk.
        box: in the chunk; None for an object.
        itemsize: bytes of an element, of `dtype`; 0 for an object.
        cuda: all destinations are on CUDA devices.
        owners: (class, item) that want it, each class once.
        again: further items of these classes that want it too, for a second destination.
    """

    where: tuple[str, int]
    chunk: tuple[str, tuple[int, ...]]
    box: Box | None
    dtype: torch.dtype | None
    cuda: bool
    owners: tuple[tuple[int, int], ...]
    again: tuple[tuple[int, int], ...] = ()

    @property
    def itemsize(self) -> int:
        return 0 if self.dtype is None else self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return 0 if self.box is None else self.box.numel * self.itemsize


@dataclass
class _Chunk:
    """What all classes want of one saved chunk: box -> (class, item) of each who wants it."""

    boxes: dict[Box | None, list[tuple[int, int]]] = field(default_factory=dict)


def item_key(item: ReadItem) -> tuple[object, ...]:
    """A key that tells the reads of one rank apart, and orders them."""
    return (
        item.dest_index.fqn,
        tuple(item.dest_index.offset or ()),
        tuple(item.dest_offsets),
        item.storage_index.fqn,
        tuple(item.storage_index.offset or ()),
        tuple(item.storage_offsets),
        tuple(item.lengths),
    )


def in_order(items: Iterable[ReadItem]) -> list[ReadItem]:
    """Reads in an order that does not depend on what a storage reader did to the plan."""
    return sorted(items, key=item_key)


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


def find_atoms(classes: Sequence[Participant], metadata: Metadata) -> list[Atom]:
    """The atoms of everything that ``classes`` (one participant of each) read, in file order.

    Boxes without elements are in no atom.
    """
    chunks: dict[tuple[str, tuple[int, ...], torch.dtype | None, bool], _Chunk] = {}
    for number, participant in enumerate(classes):
        for i, item in enumerate(participant.items):
            index = item.storage_index
            box = None
            if item.type != LoadItemType.BYTE_IO:
                box = Box(tuple(item.storage_offsets), tuple(item.lengths))
                if not box.numel:
                    continue
            key = (index.fqn, tuple(index.offset or ()), participant.dtypes[i], box is None)
            chunks.setdefault(key, _Chunk()).boxes.setdefault(box, []).append((number, i))
    places = _places(metadata)
    atoms: list[Atom] = []
    for (fqn, offset, dtype, _), chunk in chunks.items():
        name = (fqn, offset)
        for box, wanting in _cut(chunk):
            first: dict[int, int] = {}
            again = []
            for number, i in sorted(wanting):
                if number in first:
                    again.append((number, i))
                first.setdefault(number, i)
            atoms.append(
                Atom(
                    places.get(name, ("", 0)),
                    name,
                    box,
                    None if box is None else dtype,
                    all(classes[number].cuda[i] for number, i in first.items()),
                    tuple(sorted(first.items())),
                    tuple(again),
                )
            )
    atoms.sort(key=lambda a: (a.where, a.chunk, a.box.offsets if a.box else (), str(a.dtype)))
    return atoms


def _places(metadata: Metadata) -> dict[tuple[str, tuple[int, ...]], tuple[str, int]]:
    """File and offset of each saved chunk, where the storage writer's metadata tell them."""
    data = metadata.storage_data
    places: dict[tuple[str, tuple[int, ...]], tuple[str, int]] = {}
    if not isinstance(data, dict):
        return places
    for index, info in data.items():
        file, offset = getattr(info, "relative_path", ""), getattr(info, "offset", 0)
        if isinstance(file, str) and isinstance(offset, int):
            places[index.fqn, tuple(index.offset or ())] = (file, offset)
    return places


def _cut(chunk: _Chunk) -> Iterator[tuple[Box | None, list[tuple[int, int]]]]:
    """Disjoint boxes of a chunk, each with all who want it."""
    if len(chunk.boxes) == 1 or None in chunk.boxes:
        yield from chunk.boxes.items()
        return
    known = [(box, wanting) for box, wanting in chunk.boxes.items() if box is not None]
    for cluster in _clusters(known):
        yield from _disjoint(cluster)


def _clusters(
    boxes: list[tuple[Box, list[tuple[int, int]]]],
) -> Iterator[list[tuple[Box, list[tuple[int, int]]]]]:
    """Groups of boxes such that boxes of different groups have nothing in common.

    Boxes are told apart along one dimension after another, until none tells any more of them apart.
    """
    todo = [(boxes, 0, 0)]  # with the next dimension, and how many in a row told nothing
    while todo:
        group, d, useless = todo.pop()
        dims = len(group[0][0].offsets)
        if len(group) == 1 or useless == dims:
            yield sorted(group, key=lambda pair: (pair[0].offsets, pair[0].sizes))
            continue
        group.sort(key=lambda pair: pair[0].offsets[d])
        parts: list[list[tuple[Box, list[tuple[int, int]]]]] = []
        end = -1
        for pair in group:
            if pair[0].offsets[d] >= end:
                parts.append([])
            parts[-1].append(pair)
            end = max(end, pair[0].offsets[d] + pair[0].sizes[d])
        useless = useless + 1 if len(parts) == 1 else 1
        todo += [(part, (d + 1) % dims, useless) for part in parts]


def _disjoint(
    boxes: list[tuple[Box, list[tuple[int, int]]]],
) -> list[tuple[Box, list[tuple[int, int]]]]:
    """Cut boxes that may overlap into boxes that do not."""
    done: list[tuple[Box, list[tuple[int, int]]]] = []
    todo = list(reversed(boxes))
    while todo:
        box, wanting = todo.pop()
        for k, (other, theirs) in enumerate(done):
            common = box.overlap(other)
            if common is None:
                continue
            done[k] = (common, [*theirs, *wanting])
            done += [(rest, theirs) for rest in _without(other, common)]
            todo += [(rest, wanting) for rest in _without(box, common)]
            break
        else:
            done.append((box, wanting))
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
