"""From the boxes that a load wants to the byte ranges that are read.  Pure; no IO, no tensors.

Byte ranges are half-open and, unless said otherwise, offsets in a file.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

__all__ = ["Fetch", "Piece", "Segment", "box_pieces", "coalesce", "segments"]


@dataclass(frozen=True)
class Piece:
    """Bytes [start, end) of an entry's payload, wanted by consumer `key` at byte `dest` of its own
    row-major bytes; or, where `dest` is None, those of them that lie in the consumer's box.
    """

    start: int
    end: int
    key: int
    dest: int | None

    def part(self, start: int, end: int) -> Piece:
        """Of [start, end), which is within it."""
        return Piece(
            start, end, self.key, None if self.dest is None else self.dest + start - self.start
        )


@dataclass(frozen=True)
class Segment:
    """Bytes [start, end) of a file that are read for one entry.

    Attributes:
        entry: the caller's number of the entry.
        origin: the file offset that `pieces` count from, and block 0 begins at; or -1 for a part
            of the entry around its payload.
        pieces: what is wanted of the segment, by start.  They may overlap and need not cover it:
            segments are cut at checksum blocks.
        grain: it may be cut in two at multiples of this, from `origin`; 0: nowhere.
    """

    start: int
    end: int
    entry: int
    origin: int
    pieces: tuple[Piece, ...]
    grain: int = 0

    @property
    def size(self) -> int:
        return self.end - self.start

    def last_cut(self, before: int) -> int:
        """The last place at `before` or less where it may be cut, or its start."""
        cut = before - (before - self.origin) % self.grain if self.grain else self.start
        return max(cut, self.start)

    def cut(self, places: Sequence[int]) -> list[Segment]:
        """Its parts between `places`, which are within it and ascend."""
        if not places:
            return [self]
        bounds = [self.start, *places, self.end]
        inside: list[list[Piece]] = [[] for _ in bounds[1:]]
        first = 0
        for piece in self.pieces:
            while bounds[first + 1] - self.origin <= piece.start:
                first += 1
            for index in range(first, len(inside)):
                start = max(bounds[index] - self.origin, piece.start)
                end = min(bounds[index + 1] - self.origin, piece.end)
                if start >= end:
                    break
                inside[index].append(piece.part(start, end))
        return [
            replace(self, start=start, end=end, pieces=tuple(wanted))
            for start, end, wanted in zip(bounds, bounds[1:], inside, strict=False)
        ]


@dataclass(frozen=True)
class Fetch:
    """One request: bytes [start, end) of a file, for segments that lie in it without overlap."""

    name: str
    start: int
    end: int
    segments: tuple[Segment, ...]


def box_pieces(
    sizes: Sequence[int],
    offsets: Sequence[int],
    lengths: Sequence[int],
    itemsize: int,
    *,
    key: int,
    near: int,
) -> Iterator[Piece]:
    """What to read of a row-major array for a box of it, in order.

    A piece for each contiguous run, one in all where the box is contiguous, none where it is empty.
    Runs that begin less than `near` bytes after one another are read as one piece, with what is
    between them: so there is a piece for `near` bytes of the array at most, whatever the box.
    """
    if math.prod(lengths) == 0:
        return
    dims = len(sizes)
    # Trailing dimensions that the box spans whole, and the one before them, form one run.
    inner = dims
    while inner > 0 and lengths[inner - 1] == sizes[inner - 1]:
        inner -= 1
    inner = max(inner - 1, 0)
    strides, step = [itemsize] * dims, itemsize
    for dim in range(dims - 1, -1, -1):
        strides[dim] = step
        step *= sizes[dim]
    wanted = size = math.prod(lengths[inner:]) * itemsize
    base = sum(o * s for o, s in zip(offsets, strides, strict=True))
    outer = [(n, s) for n, s in zip(lengths[:inner], strides[:inner], strict=True) if n > 1]
    while outer and outer[-1][1] < near:
        count, stride = outer.pop()
        size += (count - 1) * stride
        wanted *= count
    starts = itertools.product(*(range(0, count * stride, stride) for count, stride in outer))
    for number, shifts in enumerate(starts):
        start = base + sum(shifts)
        yield Piece(start, start + size, key, number * wanted if wanted == size else None)


def segments(
    pieces: Sequence[Piece], *, entry: int, origin: int, nbytes: int, block: int, grain: int
) -> list[Segment]:
    """The segments that hold all of `pieces`, for a payload of `nbytes` at `origin` in its file.

    They are as long as can be.  With `block` > 0 they begin and end at multiples of it (or the
    payload's end), so that its checksums can be checked, and may be cut there; else at multiples of
    `grain`.  No byte is in two of them.
    """
    found: list[list[int]] = []
    inside: list[list[Piece]] = []
    for piece in sorted(pieces, key=lambda piece: (piece.start, piece.end)):
        start, end = piece.start, piece.end
        if block:
            start -= start % block
            end = min(end + -end % block, nbytes)
        if found and start <= found[-1][1]:
            found[-1][1] = max(found[-1][1], end)
            inside[-1].append(piece)
        else:
            found.append([start, end])
            inside.append([piece])
    return [
        Segment(origin + start, origin + end, entry, origin, tuple(wanted), block or grain)
        for (start, end), wanted in zip(found, inside, strict=True)
    ]


def coalesce(
    wanted: Iterable[tuple[str, Segment]], *, gap: int, limit: int, waste: float = 0.02
) -> list[Fetch]:
    """Requests for (file, segment) pairs: neighbours at most `gap` bytes apart are read as one.

    A request holds about `limit` bytes, at most a sixteenth more, or one segment that cannot be
    cut there: longer segments are cut, also to fill a request that has room for a quarter of the
    limit or more.  The bytes between segments that are read and thrown away are at most `waste` of
    a request, or `gap` where the request is small: so that closing gaps cannot cost more than it
    saves.  Returned by file, then offset.
    """
    fetches: list[Fetch] = []
    group: list[Segment] = []
    group_name, lost = "", 0  # file of the group, and bytes wasted in it
    most = limit + limit // 16

    def flush() -> None:
        if group:
            fetches.append(Fetch(group_name, group[0].start, group[-1].end, tuple(group)))
            group.clear()

    def joins(name: str, segment: Segment) -> bool:
        """Whether the group may go on with this one, or a part of it."""
        if not group or name != group_name:
            return False
        begin, hole = group[0].start, segment.start - group[-1].end
        end = segment.end
        if end - begin > most:
            end = segment.last_cut(begin + most)
            if end - segment.start < limit // 4:
                return False
        return 0 <= hole <= gap and (not hole or lost + hole <= max(waste * (end - begin), gap))

    for name, segment in sorted(wanted, key=lambda pair: (pair[0], pair[1].start)):
        if joins(name, segment):
            lost += segment.start - group[-1].end
        else:
            flush()
            group_name, lost = name, 0
        begin = group[0].start if group else segment.start
        places: list[int] = []
        while segment.grain and segment.end - begin > most:
            # The first part may fill up what lies before it; the others are of `limit` bytes.
            cut = segment.last_cut(begin + (limit if places or not group else most))
            if places or not group:
                cut = max(cut, begin + segment.grain - (begin - segment.origin) % segment.grain)
            if cut >= segment.end:
                break
            places.append(cut)
            begin = cut
        for number, part in enumerate(segment.cut(places)):
            if number:
                flush()
                lost = 0
            group.append(part)
    flush()
    return fetches
