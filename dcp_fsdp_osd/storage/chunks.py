"""The boxes that a tensor was saved in, as columns of integers, and the search among them.  Pure.

At thousands of ranks a tensor lies in hundreds of boxes, of which a rank wants one or two.  An
object for each costs 3 microseconds and 500 bytes, and DCP compares each with each that is wanted.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple, overload

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata

__all__ = ["MANY", "ChunkTable", "Overlap", "chunk_table"]

MANY = 16
"""Boxes from which on a table finds some sooner than a loop over objects."""
_LIMIT = 1 << 62
_FEW = 32  # boxes that are taken out of columns one by one, which is slow


class Overlap(NamedTuple):
    """What a box that is wanted has in common with a saved one.

    Attributes:
        number: of the saved box.
        saved: its offsets.
        offsets, sizes: of what is common, in the whole tensor.
    """

    number: int
    saved: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class _Search(NamedTuple):
    """Boxes with elements, in row-major order of their first one.

    Attributes:
        numbers: of the boxes.
        firsts: positions of their first elements.
        ends: up to each box, where the last of those before it and of its own lies.
    """

    numbers: list[int]
    firsts: list[int]
    ends: list[int]


class ChunkTable(Sequence[ChunkStorageMetadata]):
    """``TensorStorageMetadata.chunks``: a read-only sequence, whose objects are made as they are
    asked for.  A pickle or a deep copy of it is a list.

    Args:
        size: of the tensor.
        offsets, sizes: of the boxes, as int64 of shape (dimensions, boxes).

    Attributes:
        columns: offsets and sizes.

    Raises:
        ValueError: they do not fit each other, or lie outside of the tensor.
    """

    def __init__(self, size: Sequence[int], offsets: torch.Tensor, sizes: torch.Tensor) -> None:
        self.size = tuple(size)
        self._check(offsets, sizes)
        self.columns = offsets, sizes
        self._taken = 0

    def _check(self, offsets: torch.Tensor, sizes: torch.Tensor) -> None:
        dims = len(self.size)
        if offsets.shape != sizes.shape or offsets.dim() != 2 or len(offsets) != dims:
            raise ValueError(f"boxes of other dimensions than a tensor of sizes {self.size}")
        if math.prod(max(n, 1) for n in self.size) >= _LIMIT:
            raise ValueError(f"a tensor of sizes {self.size}, more than can be counted")
        most = torch.tensor(self.size, dtype=torch.int64).unsqueeze(1)
        # No sum overflows: what is subtracted is no more than what it is subtracted from.
        if bool(((offsets < 0) | (sizes < 0) | (offsets > most) | (sizes > most - offsets)).any()):
            raise ValueError(f"a box that lies outside of a tensor of sizes {self.size}")

    @property
    def known(self) -> ChunkTable:
        """Itself, decoded."""
        return self

    def __len__(self) -> int:
        return self.columns[0].shape[1]

    def at(self, number: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Offsets and sizes of a box."""
        known = self.known
        if known is not self:
            return known.at(number)
        self._taken += 1
        if self._taken > _FEW:
            return self._all[number]
        offsets, sizes = self.columns
        return tuple(offsets[:, number].tolist()), tuple(sizes[:, number].tolist())

    @cached_property
    def _all(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        offsets, sizes = (map(tuple, each.t().tolist()) for each in self.columns)
        return list(zip(offsets, sizes, strict=True))

    @overload
    def __getitem__(self, number: int) -> ChunkStorageMetadata: ...
    @overload
    def __getitem__(self, number: slice) -> list[ChunkStorageMetadata]: ...
    def __getitem__(self, number: int | slice) -> Any:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        if not -len(self) <= number < len(self):
            raise IndexError(f"chunk {number} of {len(self)}")
        return _object(*self.at(number))

    def __iter__(self) -> Iterator[ChunkStorageMetadata]:
        offsets, sizes = (each.t().tolist() for each in self.known.columns)
        return map(_object, offsets, sizes)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ChunkTable):
            mine, theirs = self.known, other.known
            return mine is theirs or (
                mine.size == theirs.size
                and len(mine) == len(theirs)
                and all(map(torch.equal, mine.columns, theirs.columns))
            )
        return isinstance(other, list) and list(self) == other

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} boxes of a tensor of sizes {self.size})"

    @cached_property
    def search(self) -> _Search:
        """What :meth:`overlapping` looks through."""
        offsets, sizes = self.columns
        strides = [math.prod(self.size[dim + 1 :]) for dim in range(len(self.size))]
        steps = torch.tensor(strides, dtype=torch.int64).unsqueeze(1)
        numbers = (sizes > 0).all(0).nonzero().squeeze(1)
        first = (offsets[:, numbers] * steps).sum(0)
        last = first + ((sizes[:, numbers] - 1) * steps).sum(0)
        first, order = first.sort(stable=True)
        ends = last[order].cummax(0).values if len(order) else last
        return _Search(numbers[order].tolist(), first.tolist(), ends.tolist())

    def _position(self, offsets: Sequence[int]) -> int:
        position = 0
        for offset, count in zip(offsets, self.size, strict=True):
            position = position * count + offset
        return position

    def overlapping(self, offsets: Sequence[int], sizes: Sequence[int]) -> list[Overlap]:
        """The boxes that have elements of the one at `offsets` of `sizes`, by their numbers."""
        if 0 in sizes:
            return []
        search = self.known.search
        first = self._position(offsets)
        last = self._position([o + n - 1 for o, n in zip(offsets, sizes, strict=True)])
        begin, end = bisect_left(search.ends, first), bisect_right(search.firsts, last)
        found = []
        for number in search.numbers[begin:end]:
            at, of = self.at(number)
            low = tuple(map(max, at, offsets))
            high = [min(a + n, b + m) for a, n, b, m in zip(at, of, offsets, sizes, strict=True)]
            common = tuple(b - a for a, b in zip(low, high, strict=True))
            if min(common, default=1) > 0:
                found.append(Overlap(number, at, low, common))
        return sorted(found)

    def find(self, offsets: Sequence[int], near: int | None = None) -> int | None:
        """The number of the box at `offsets`; of one with elements, if there is one.

        `near` is what the number probably is (``MetadataIndex.index``).
        """
        if len(offsets) != len(self.size):
            return None
        wanted = tuple(offsets)
        if near is not None and 0 <= near < len(self):
            found, sizes = self.at(near)
            if found == wanted and 0 not in sizes:
                return near
        search = self.known.search
        position = self._position(offsets)
        for place in range(bisect_left(search.firsts, position), len(search.firsts)):
            if search.firsts[place] != position:
                break
            number = search.numbers[place]
            if self.at(number)[0] == wanted:
                return number
        if len(search.numbers) < len(self):
            for number in sorted(set(range(len(self))) - set(search.numbers)):
                if self.at(number)[0] == wanted:
                    return number
        return None

    @cached_property
    def by_offsets(self) -> dict[tuple[int, ...], int]:
        """What :meth:`find` finds, for those who ask for many."""
        offsets = list(map(tuple, self.known.columns[0].t().tolist()))
        found: dict[tuple[int, ...], int] = {}
        for number in itertools.chain(self.known.search.numbers, range(len(offsets))):
            found.setdefault(offsets[number], number)
        return found

    def tiles(self) -> bool:
        """Whether each box is an interval of the tensor in row-major order, and together they are
        all of it, each element once.  (Boxes that are no intervals may be as well.)
        """
        search = self.known.search
        _, sizes = self.known.columns
        counts = sizes.prod(0)[search.numbers].tolist()
        position = 0
        for first, count, end in zip(search.firsts, counts, search.ends, strict=True):
            if first != position or end != first + count - 1:
                return False
            position += count
        return position == math.prod(self.size)


def _object(offsets: Sequence[int], sizes: Sequence[int]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def chunk_table(stored: TensorStorageMetadata) -> ChunkTable:
    """The boxes of a tensor of anybody's metadata.

    Raises:
        ValueError: as of :class:`ChunkTable`.
    """
    if isinstance(stored.chunks, ChunkTable):
        return stored.chunks
    offsets, sizes = (
        _columns([getattr(chunk, name) for chunk in stored.chunks], len(stored.size))
        for name in ("offsets", "sizes")
    )
    return ChunkTable(stored.size, offsets, sizes)


def _columns(values: list[torch.Size], dims: int) -> torch.Tensor:
    flat = [number for value in values for number in value]
    if any(len(value) != dims for value in values):
        raise ValueError(f"boxes of other than {dims} dimensions")
    return torch.tensor(flat, dtype=torch.int64).view(len(values), dims).t()
