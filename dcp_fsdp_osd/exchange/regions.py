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
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from dcp_fsdp_osd.compact import Numbers, numbers
from dcp_fsdp_osd.exchange.reads import Ints, Reads, box_of, item_key, reads_of
from dcp_fsdp_osd.layout.geometry import Box
from dcp_fsdp_osd.storage.places import Places

__all__ = ["Classes", "Part", "Participant", "Regions", "find_regions", "narrowed"]


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


class Classes:
    """Ranks with the same reads, as one.

    Attributes:
        participants: all ranks.
        members: numbers of the participants in each class, ascending.
        first: one participant of each class.
        reads: of all classes, one after the other.
        class_of: the class of each participant, by number.
    """

    def __init__(self, participants: Sequence[Participant]) -> None:
        self.participants = participants
        of_digest: dict[bytes, list[int]] = {}
        for n, participant in enumerate(participants):
            of_digest.setdefault(participant.digest, []).append(n)
        self.members = list(of_digest.values())
        self.first = [participants[those[0]] for those in self.members]
        self.reads = reads_of([participant.items for participant in self.first])
        self.class_of = {n: number for number, those in enumerate(self.members) for n in those}
        self._wanting: dict[tuple[int, ...], Numbers] = {}

    def item(self, row: int) -> tuple[int, int]:
        """The class that a row of `reads` is of, and the number of the item there."""
        number = int(self.reads.plan[row])
        return number, row - int(self.reads.begins[number])

    def wanting(self, classes: tuple[int, ...]) -> Numbers:
        """The participants in some classes, ascending: one value for all who ask."""
        if classes not in self._wanting:
            those = sorted(n for number in classes for n in self.members[number])
            self._wanting[classes] = numbers(those)
        return self._wanting[classes]


@dataclass(frozen=True)
class Regions:
    """Boxes of saved chunks (or saved objects) that each one fixed set of ranks wants.

    Columns with a row for each, in file order.

    Attributes:
        files: names, ascending.
        file: that the chunk lies in, by its number among `files`.
        chunk: a number, equal for those that one read of a whole chunk has all of.
        offsets, sizes: of the box in the chunk, as of :class:`~dcp_fsdp_osd.exchange.reads.Reads`.
        objects: whether it is an object.
        cuda: all destinations are on CUDA devices.
        dtypes, dtype: that it is read in, by its number; None for an object.
        numel: elements; 1 for an object.
        itemsize: bytes of an element; 0 for an object, whose size is not known yet.
        nbytes: of all elements.
        begins, counts: the first of each region's owners, and how many they are.
        owners: who wants it, each class once, ascending: as rows of the classes' reads.
        again, more: regions that a class wants for a second destination, and the row of this.
    """

    files: list[str]
    file: Ints
    chunk: Ints
    offsets: Ints
    sizes: Ints
    objects: npt.NDArray[np.bool_]
    cuda: npt.NDArray[np.bool_]
    dtypes: list[torch.dtype | None]
    dtype: Ints
    numel: Ints
    itemsize: Ints
    nbytes: Ints
    begins: Ints
    counts: Ints
    owners: Ints
    again: Ints
    more: Ints

    def __len__(self) -> int:
        return len(self.file)

    def box(self, k: int) -> Box:
        return box_of(self.offsets[k], self.sizes[k])

    def dtype_of(self, k: int) -> torch.dtype | None:
        return self.dtypes[int(self.dtype[k])]

    def base(self, k: int) -> int:
        """Where its first byte lies in the chunk, if that is 1-D; else 0."""
        sizes = self.sizes[k]
        return int(self.offsets[k, 0] * self.itemsize[k]) if (sizes >= 0).sum() == 1 else 0


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


_Wanted = tuple[Box, list[int]]  # a box, and who wants it: rows of the reads


def find_regions(classes: Classes, metadata: Metadata) -> Regions:
    """The regions of everything that ``classes`` read, in file order.

    Boxes without elements are in no region.
    """
    reads = classes.reads
    dtypes, dtype = _dtypes(classes)
    saved, first = _ranked(reads.name, *reads.chunk.T)
    chunk = saved * len(dtypes) + dtype
    (rows,) = (reads.objects | (reads.sizes != 0).all(1)).nonzero()
    rows, offsets, sizes = _disjoint_boxes(reads, chunk, rows)

    files, file, place = _places(metadata, reads, first)
    order = np.lexsort((rows, dtype[rows], *offsets.T[::-1], place[saved[rows]]))
    rows, offsets, sizes = rows[order], offsets[order], sizes[order]
    new = _changes(chunk[rows], *offsets.T)
    region, number = new.cumsum() - 1, reads.plan[rows]
    again = np.zeros(len(rows), bool)
    again[1:] = (region[1:] == region[:-1]) & (number[1:] == number[:-1])
    owners, owned = rows[~again], region[~again]
    cuda = np.fromiter(_each(first.cuda for first in classes.first), bool, len(reads.name))
    on_gpu = np.ones(int(new.sum()), bool)
    on_gpu[owned[~cuda[owners]]] = False
    lead, offsets, sizes = rows[new], offsets[new], sizes[new]
    counts = np.bincount(owned, minlength=len(lead))
    itemsizes = [0 if each is None else each.itemsize for each in dtypes]
    numel = np.where(sizes < 0, 1, sizes).prod(1)
    itemsize = np.array(itemsizes, np.int64)[dtype[lead]]
    return Regions(
        files,
        file[saved[lead]],
        chunk[lead],
        offsets,
        sizes,
        reads.objects[lead],
        on_gpu,
        dtypes,
        dtype[lead],
        numel,
        itemsize,
        numel * itemsize,
        counts.cumsum() - counts,
        counts,
        owners,
        region[again],
        rows[again],
    )


_each = itertools.chain.from_iterable


def _dtypes(classes: Classes) -> tuple[list[torch.dtype | None], Ints]:
    """Those that are read, by name; and the number of each read's.  Objects have none."""
    each = list(_each(first.dtypes for first in classes.first))
    found = sorted({*each, None}, key=str)
    number = {dtype: k for k, dtype in enumerate(found)}
    dtype = np.array([number[one] for one in each], np.int64)
    dtype[classes.reads.objects] = number[None]
    return found, dtype


def _changes(*columns: Ints) -> npt.NDArray[np.bool_]:
    """Rows that differ from the one before; the first does."""
    found = np.zeros(len(columns[0]), bool)
    found[:1] = True
    for column in columns:
        found[1:] |= column[1:] != column[:-1]
    return found


def _ranked(*columns: Ints) -> tuple[Ints, Ints]:
    """Each row's number among those that differ, in their order; and the first row of each."""
    order = np.lexsort(columns[::-1])
    new = _changes(*(column[order] for column in columns))
    rank = np.empty(len(order), np.int64)
    rank[order] = new.cumsum() - 1
    return rank, order[new]


def _places(metadata: Metadata, reads: Reads, rows: Ints) -> tuple[list[str], Ints, Ints]:
    """Where the saved chunks that ``rows`` read of lie, by the storage writer's metadata.

    Returns: names of files, ascending; for each row, the number of its file, and its own number in
    file order.
    """
    data = metadata.storage_data
    known: dict[str, dict[tuple[int, ...], tuple[str, int]]] = {}
    if not isinstance(data, Places):
        for index, info in data.items() if isinstance(data, dict) else ():
            file, at = getattr(info, "relative_path", ""), getattr(info, "offset", 0)
            if isinstance(file, str) and isinstance(at, int) and 0 <= at < 1 << 62:
                known.setdefault(index.fqn, {})[tuple(index.offset or ())] = file, at
    found: list[tuple[str, int] | None] = []
    for those in _split(rows, reads.name):
        fqn = reads.names[reads.name[those[0]]]
        dims = int((reads.chunk[those] >= 0).sum(1).max())
        offsets = list(map(tuple, reads.chunk[those, :dims].tolist()))
        if isinstance(data, Places):  # what is asked for, and not all there is
            objects = reads.objects[those].tolist()
            pairs = zip(objects, offsets, strict=True)
            found += data.located(fqn, [None if an_object else at for an_object, at in pairs])
        else:
            found += map(known.get(fqn, {}).get, offsets)
    names = [place[0] if place else "" for place in found]
    files = sorted(set(names))
    number = {name: k for k, name in enumerate(files)}
    file = np.array([number[name] for name in names], np.int64)
    at = np.array([place[1] if place else 0 for place in found], np.int64)
    return files, file, _ranked(file, at, np.arange(len(rows)))[0]


def _disjoint_boxes(reads: Reads, chunk: Ints, rows: Ints) -> tuple[Ints, Ints, Ints]:
    """What ``rows`` read, cut such that boxes of a chunk are equal or have nothing in common.

    Returns: rows, one for each of the boxes that its box was cut into; and their offsets and sizes.
    """
    within, sizes = reads.within, reads.sizes
    rows = rows[np.lexsort([each[rows] for each in (*sizes.T, *within.T[::-1], chunk)])]
    # Most boxes follow one another: the last element of each comes before the first of the next.
    low, high = within[rows], within[rows] + np.maximum(sizes[rows] - 1, 0)
    after, equal = np.zeros(len(rows), bool), np.ones(len(rows), bool)
    for d in range(low.shape[1]):
        after[1:] |= equal[1:] & (low[1:, d] > high[:-1, d])
        equal[1:] &= low[1:, d] == high[:-1, d]
    meets = ~after & ~_changes(chunk[rows]) & _changes(*low.T, *sizes[rows].T)
    cut = np.isin(chunk[rows], chunk[rows[meets]])
    pieces = [piece for those in _split(rows[cut], chunk) for piece in _cut(reads, those)]
    whole, width = rows[~cut], low.shape[1]
    return (
        np.append(whole, np.array([row for row, _ in pieces], np.int64)),
        np.vstack((within[whole], _padded([box.offsets for _, box in pieces], width))),
        np.vstack((sizes[whole], _padded([box.sizes for _, box in pieces], width))),
    )


def _padded(rows: Sequence[tuple[int, ...]], width: int) -> Ints:
    full = [(*row, *[-1] * (width - len(row))) for row in rows]
    return np.array(full, np.int64).reshape(len(rows), width)


def _split(rows: Ints, by: Ints) -> list[Ints]:
    """Groups of neighbours that are equal ``by``."""
    (begins,) = _changes(by[rows]).nonzero()
    return np.split(rows, begins[1:]) if len(rows) else []


def _cut(reads: Reads, rows: Ints) -> Iterator[tuple[int, Box]]:
    """What ``rows`` read of one chunk, in disjoint boxes: who wants it, and what."""
    wanted: dict[Box, list[int]] = {}
    for row in rows.tolist():
        wanted.setdefault(box_of(reads.within[row], reads.sizes[row]), []).append(row)
    for cluster in _clusters(list(wanted.items())):
        for box, owners in _disjoint(cluster):
            yield from ((row, box) for row in owners)


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
