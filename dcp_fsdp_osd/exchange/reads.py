"""The reads of ranks: their order, their keys, and what of them travels.  Pure.

A plan of thousands of ranks has hundreds of thousands of reads, of which the coordinator needs the
boxes, to find what several ranks want alike, and hardly ever the objects: so they travel as columns
of numbers, and those of all ranks are laid end to end.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from dcp_fsdp_osd.compact import Lazy, joined, parted
from dcp_fsdp_osd.layout.geometry import Box

__all__ = ["Ints", "Reads", "SentItems", "box_of", "in_order", "item_key", "reads_of"]

Ints = npt.NDArray[np.int64]

_NONE = -1
_OBJECT, _DEST, _STORED, _DIMS = 0, 1, 2, 5
_COLUMNS = 10
"""Of an item: whether it is an object; the numbers of two names, less the one before; two hints;
and the dimensions of five tuples."""


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


@dataclass(frozen=True)
class Reads:
    """What several plans read, plan after plan: columns with a row for each read.

    Attributes:
        begins: the first row of each plan, and in the end the number of rows.
        plan: the number of each row's plan.
        names: FQNs, ascending.
        name: of what is read, by its number among `names`.
        objects: whether it is an object, of which the rest says nothing.
        chunk, within, sizes: offsets of a saved chunk, and offsets in it and sizes of what is read;
            of shape (rows, dimensions), with -1 for dimensions that a row has not got.
    """

    begins: Ints
    plan: Ints
    names: list[str]
    name: Ints
    objects: npt.NDArray[np.bool_]
    chunk: Ints
    within: Ints
    sizes: Ints


def box_of(offsets: Ints, sizes: Ints) -> Box:
    """Of one row."""
    dims = int((sizes >= 0).sum())
    return Box(tuple(offsets[:dims].tolist()), tuple(sizes[:dims].tolist()))


def reads_of(plans: Sequence[Sequence[ReadItem]]) -> Reads:
    """What ``plans`` read; of :class:`SentItems` no item is made."""
    known: dict[str, int] = {}
    found = []
    for items in plans:
        names, rows, numbers = items.columns() if isinstance(items, SentItems) else _columns(items)
        number = np.array([known.setdefault(name, len(known)) for name in names], np.int64)
        found.append((number[rows[_STORED]], rows, numbers))
    names = sorted(known)
    rank = np.empty(len(names), np.int64)
    rank[[known[name] for name in names]] = range(len(names))
    name, rows, numbers = (np.concatenate(each, axis=-1) for each in zip(*found, strict=True))
    begins = np.cumsum([0, *(each[1].shape[1] for each in found)])
    objects = rows[_OBJECT].astype(bool)
    dims = np.maximum(rows[_DIMS:], 0)
    ends = dims.sum(0).cumsum() - dims.sum(0) + dims.cumsum(0)  # of each tuple, among the numbers
    dims[3:, objects] = 0
    chunk, within, sizes = (
        _padded(numbers, ends[k] - dims[k], dims[k], max(int(dims.max(initial=0)), 1))
        for k in (2, 3, 4)
    )
    plan = np.repeat(np.arange(len(plans)), np.diff(begins))
    return Reads(begins, plan, names, rank[name], objects, chunk, within, sizes)


def _padded(numbers: Ints, starts: Ints, dims: Ints, width: int) -> Ints:
    """``dims`` numbers from ``starts`` on, a row each."""
    found = np.full((len(starts), width), _NONE)
    for d in range(width):
        (rows,) = (dims > d).nonzero()
        found[rows, d] = numbers[starts[rows] + d]
    return found


_Columns = tuple[list[str], Ints, Ints]
"""Names; rows, as of shape (columns, items); offsets and lengths of all of them, in a row."""


class SentItems(Lazy):
    """The items of a plan that came as columns of numbers; made when they are looked into.

    Attributes:
        proposed: they are those that the planner had proposed, :func:`in_order`.
    """

    def __init__(self, data: bytes, count: int, proposed: bool) -> None:
        super().__init__(lambda: list(_items(*self.columns())), count)
        self._data, self.proposed = data, proposed

    @staticmethod
    def pack(items: Sequence[ReadItem]) -> bytes:
        names, rows, numbers = _columns(items)
        rows[_STORED] -= rows[_DEST]
        rows[_DEST, 1:] -= rows[_DEST, :-1].copy()
        return joined(rows.tobytes() + numbers.tobytes(), json.dumps(names, separators=(",", ":")))

    def columns(self) -> _Columns:
        data, names = parted(self._data)
        found = np.frombuffer(data, np.int64)
        rows = found[: _COLUMNS * len(self)].reshape(_COLUMNS, len(self)).copy()
        rows[_DEST] = rows[_DEST].cumsum()
        rows[_STORED] += rows[_DEST]
        return json.loads(names), rows, found[rows.size :]


def _columns(items: Sequence[ReadItem]) -> _Columns:
    names: dict[str, int] = {}
    rows: list[int] = []
    numbers: list[int] = []
    for item in items:
        dest, stored = item.dest_index, item.storage_index
        tuples = dest.offset, item.dest_offsets, stored.offset, item.storage_offsets, item.lengths
        rows.append(item.type == LoadItemType.BYTE_IO)
        rows += [names.setdefault(index.fqn, len(names)) for index in (dest, stored)]
        rows += [_NONE if index.index is None else index.index for index in (dest, stored)]
        rows += [_NONE if each is None else len(each) for each in tuples]
        numbers += itertools.chain.from_iterable(each or () for each in tuples)
    found = np.array(rows, np.int64).reshape(len(items), _COLUMNS)
    return list(names), found.T.copy(), np.array(numbers, np.int64)


def _items(names: Sequence[str], rows: Ints, numbers: Ints) -> Iterator[ReadItem]:
    at = iter(numbers.tolist())
    for an_object, dest_name, stored_name, *hints, a, b, c, d, e in rows.T.tolist():
        first, second = (None if hint == _NONE else hint for hint in hints)
        five: Any = [_size(dims, at) for dims in (a, b, c, d, e)]
        dest = MetadataIndex(names[dest_name], five[0], first)
        stored = MetadataIndex(names[stored_name], five[2], second)
        kind = LoadItemType.BYTE_IO if an_object else LoadItemType.TENSOR
        yield ReadItem(kind, dest, five[1], stored, five[3], five[4])


def _size(dims: int, numbers: Iterator[int]) -> torch.Size | None:
    return None if dims == _NONE else torch.Size(list(itertools.islice(numbers, dims)))
