"""The reads of one rank: their order, their keys, and what of them travels.  Pure.

A plan of thousands of ranks has hundreds of thousands of reads, of which the coordinator needs the
boxes, to find what several ranks want alike, and hardly ever the objects.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from dcp_fsdp_osd.compact import Lazy, dump_strings, joined, load_strings, no_collections, parted

__all__ = ["SentItems", "Want", "in_order", "item_key", "wants"]

_NONE = -1
_SIZES = 7  # of an item: two hints, and the dimensions of five tuples

Want = tuple[str, tuple[int, ...], tuple[int, ...] | None, tuple[int, ...]]
"""FQN and offsets of a saved chunk; offsets in it (None: an object) and sizes of what is read."""


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


def wants(items: Sequence[ReadItem]) -> list[Want]:
    """What each of ``items`` reads; of :class:`SentItems` no item is made."""
    if isinstance(items, SentItems):
        return list(_wants(*items.columns()))
    return [
        (
            item.storage_index.fqn,
            tuple(item.storage_index.offset or ()),
            None if item.type == LoadItemType.BYTE_IO else tuple(item.storage_offsets),
            tuple(item.lengths),
        )
        for item in items
    ]


_Columns = tuple[list[LoadItemType], list[str], bytes, bytes]
"""Types; names, two an item; hints and dimensions; offsets and lengths."""


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
        return joined(*dump_strings(_columns(items)))

    def columns(self) -> _Columns:
        found, strings = parted(self._data)
        with no_collections():
            columns: _Columns = load_strings(found, strings.decode())
        return columns


def _columns(items: Sequence[ReadItem]) -> _Columns:
    names = [each for i in items for each in (i.dest_index.fqn, i.storage_index.fqn)]
    numbers = array("q")
    sizes = array("q")
    for item in items:
        dest, stored = item.dest_index, item.storage_index
        tuples = dest.offset, item.dest_offsets, stored.offset, item.storage_offsets, item.lengths
        for hint in (dest.index, stored.index):
            sizes.append(_NONE if hint is None else hint)
        for each in tuples:
            sizes.append(_NONE if each is None else len(each))
            numbers.extend(each or ())
    return [item.type for item in items], names, sizes.tobytes(), numbers.tobytes()


def _items(
    types: Sequence[Any], names: Sequence[str], sizes: bytes, numbers: bytes
) -> Iterator[ReadItem]:
    size, at = iter(array("q", sizes)), iter(array("q", numbers))
    for number, kind in enumerate(types):
        hints = [None if hint == _NONE else hint for hint in (next(size), next(size))]
        five: Any = [_size(next(size), at) for _ in range(5)]
        dest = MetadataIndex(names[2 * number], five[0], hints[0])
        stored = MetadataIndex(names[2 * number + 1], five[2], hints[1])
        yield ReadItem(kind, dest, five[1], stored, five[3], five[4])


def _size(dims: int, numbers: Iterator[int]) -> torch.Size | None:
    return None if dims == _NONE else torch.Size([next(numbers) for _ in range(dims)])


def _wants(
    types: Sequence[LoadItemType], names: Sequence[str], sizes: bytes, numbers: bytes
) -> Iterator[Want]:
    flat, rows = tuple(array("q", numbers)), iter(array("q", sizes))
    end = 0
    for kind, name, row in zip(types, names[1::2], zip(*[rows] * _SIZES, strict=True), strict=True):
        _, _, dest, inner, saved, read, dims = row
        first = end + max(dest, 0) + inner
        second = first + max(saved, 0)
        third, end = second + read, second + read + dims
        box = None if kind == LoadItemType.BYTE_IO else flat[second:third]
        yield name, flat[first:second], box, flat[third:end]
