"""From the boxes that a load wants to the byte ranges that are read.  Pure; no IO, no tensors.

Byte ranges are half-open and, unless said otherwise, offsets in a file.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Fetch", "Piece", "Segment", "box_runs", "coalesce", "segments"]


@dataclass(frozen=True)
class Piece:
    """Bytes [start, end) of an entry's payload, wanted by consumer `key` at byte `dest` of its own
    row-major bytes.
    """

    start: int
    end: int
    key: int
    dest: int


@dataclass(frozen=True)
class Segment:
    """Bytes [start, end) of a file that are read for one entry.

    Attributes:
        entry: the caller's number of the entry.
        origin: the file offset that `pieces` count from, and block 0 begins at; or -1 for a part
            of the entry around its payload.
        pieces: what is wanted of the segment, by start.  They may overlap and need not cover it:
            segments are cut at checksum blocks.
    """

    start: int
    end: int
    entry: int
    origin: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Fetch:
    """One request: bytes [start, end) of a file, for segments that lie in it without overlap."""

    name: str
    start: int
    end: int
    segments: tuple[Segment, ...]


def box_runs(
    sizes: Sequence[int], offsets: Sequence[int], lengths: Sequence[int], itemsize: int
) -> Iterator[tuple[int, int]]:
    """The contiguous (start, end) byte runs of a box in a row-major array, in order.

    One run where the box is a contiguous piece of the array; none where it is empty.
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
    size = math.prod(lengths[inner:]) * itemsize
    base = sum(o * s for o, s in zip(offsets, strides, strict=True))
    outer = [(n, s) for n, s in zip(lengths[:inner], strides[:inner], strict=True) if n > 1]

    def walk(level: int, start: int) -> Iterator[tuple[int, int]]:
        if level == len(outer):
            yield start, start + size
            return
        count, stride = outer[level]
        for index in range(count):
            yield from walk(level + 1, start + index * stride)

    yield from walk(0, base)


def segments(
    pieces: Sequence[Piece], *, entry: int, origin: int, nbytes: int, block: int, limit: int
) -> list[Segment]:
    """The segments that hold all of `pieces`, for a payload of `nbytes` at `origin` in its file.

    With `block` > 0 they begin and end at multiples of it (or the payload's end), so that its
    checksums can be checked.  None is longer than `limit` (which is rounded up to a whole block),
    no byte is in two of them, and pieces are cut where segments end.
    """
    if block:
        limit = max(block, limit - limit % block)
    ranges: list[list[int]] = []
    ordered = sorted(pieces, key=lambda piece: (piece.start, piece.end))
    for piece in ordered:
        start, end = piece.start, piece.end
        if block:
            start -= start % block
            end = min(end + -end % block, nbytes)
        if ranges and start <= ranges[-1][1]:
            ranges[-1][1] = max(ranges[-1][1], end)
        else:
            ranges.append([start, end])
    cut = [
        (position, min(position + limit, end))
        for start, end in ranges
        for position in range(start, end, limit)
    ]
    inside: list[list[Piece]] = [[] for _ in cut]
    first = 0
    for piece in ordered:
        while cut[first][1] <= piece.start:
            first += 1
        for index in range(first, len(cut)):
            start, end = max(cut[index][0], piece.start), min(cut[index][1], piece.end)
            if start >= end:
                break
            inside[index].append(Piece(start, end, piece.key, piece.dest + start - piece.start))
    return [
        Segment(origin + start, origin + end, entry, origin, tuple(wanted))
        for (start, end), wanted in zip(cut, inside, strict=True)
    ]


def coalesce(
    wanted: Iterable[tuple[str, Segment]], *, gap: int, limit: int, waste: float = 0.02
) -> list[Fetch]:
    """Requests for (file, segment) pairs: neighbours at most `gap` bytes apart are read as one.

    A request holds at most `limit` bytes, or one segment.  The bytes between segments that are read
    and thrown away are at most `waste` of a request, or `gap` where the request is small: so that
    closing gaps cannot cost more than it saves.  Returned by file, then offset.
    """
    fetches: list[Fetch] = []
    group: list[Segment] = []
    state = ("", 0, 0)  # file, end of the group, bytes wasted in it

    def flush() -> None:
        if group:
            fetches.append(Fetch(state[0], group[0].start, group[-1].end, tuple(group)))
            group.clear()

    for name, segment in sorted(wanted, key=lambda pair: (pair[0], pair[1].start)):
        if group:
            hole = segment.start - state[1]
            size = segment.end - group[0].start
            lost = state[2] + hole
            if (
                name == state[0]
                and 0 <= hole <= gap
                and size <= limit
                and lost <= max(waste * size, gap if hole else 0)
            ):
                group.append(segment)
                state = (name, segment.end, lost)
                continue
            flush()
        group.append(segment)
        state = (name, segment.end, 0)
    flush()
    return fetches
