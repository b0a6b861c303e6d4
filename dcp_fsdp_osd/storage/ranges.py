"""From the boxes that a load wants to the byte ranges that are read.  Pure; no IO, no tensors.

Byte ranges are half-open and, unless said otherwise, offsets in a file.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

__all__ = ["Fetch", "FileRange", "Span", "box_spans", "coalesce", "file_ranges"]


@dataclass(frozen=True)
class Span:
    """Bytes [start, end) of an entry's payload, wanted by consumer `key` at byte `dest` of its own
    row-major bytes; or, where `dest` is None, those of them that lie in the consumer's box.
    """

    start: int
    end: int
    key: int
    dest: int | None

    def clipped(self, start: int, end: int) -> Span:
        """What of it lies in [start, end), which is within it."""
        return Span(
            start, end, self.key, None if self.dest is None else self.dest + start - self.start
        )


@dataclass(frozen=True)
class FileRange:
    """Bytes [start, end) of a file that are read for one entry.

    Attributes:
        entry: the caller's number of the entry.
        origin: the file offset that `spans` count from, and block 0 begins at; or -1 for a part
            of the entry around its payload.
        spans: what is wanted of it, by start.  They may overlap and need not cover it:
            ranges are cut at checksum blocks.
        grain: it may be cut in two at multiples of this, from `origin`; 0: nowhere.
    """

    start: int
    end: int
    entry: int
    origin: int
    spans: tuple[Span, ...]
    grain: int = 0

    def last_cut(self, before: int) -> int:
        """The last place at `before` or less where it may be cut, or its start."""
        cut = before - (before - self.origin) % self.grain if self.grain else self.start
        return max(cut, self.start)

    def cut(self, places: Sequence[int]) -> list[FileRange]:
        """Its parts between `places`, which are within it and ascend."""
        if not places:
            return [self]
        bounds = [self.start, *places, self.end]
        inside: list[list[Span]] = [[] for _ in bounds[1:]]
        first = 0
        for span in self.spans:
            while bounds[first + 1] - self.origin <= span.start:
                first += 1
            for index in range(first, len(inside)):
                start = max(bounds[index] - self.origin, span.start)
                end = min(bounds[index + 1] - self.origin, span.end)
                if start >= end:
                    break
                inside[index].append(span.clipped(start, end))
        return [
            replace(self, start=start, end=end, spans=tuple(wanted))
            for start, end, wanted in zip(bounds, bounds[1:], inside, strict=False)
        ]


@dataclass(frozen=True)
class Fetch:
    """One request: bytes [start, end) of a file, for ranges that lie in it without overlap."""

    name: str
    start: int
    end: int
    ranges: tuple[FileRange, ...]


def box_spans(
    sizes: Sequence[int],
    offsets: Sequence[int],
    lengths: Sequence[int],
    itemsize: int,
    *,
    key: int,
    near_bytes: int,
) -> Iterator[Span]:
    """What to read of a row-major array for a box of it, in order.

    A span for each contiguous run, one in all where the box is contiguous, none where it is empty.
    Runs that begin less than `near_bytes` after one another are read as one span, with what is
    between them: so there is a span for `near_bytes` of the array at most, whatever the box.
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
    while outer and outer[-1][1] < near_bytes:
        count, stride = outer.pop()
        size += (count - 1) * stride
        wanted *= count
    starts = itertools.product(*(range(0, count * stride, stride) for count, stride in outer))
    for number, shifts in enumerate(starts):
        start = base + sum(shifts)
        yield Span(start, start + size, key, number * wanted if wanted == size else None)


def file_ranges(
    spans: Sequence[Span], *, entry: int, origin: int, nbytes: int, block: int, grain: int
) -> list[FileRange]:
    """The ranges that hold all of `spans`, for a payload of `nbytes` at `origin` in its file.

    They are as long as can be.  With `block` > 0 they begin and end at multiples of it (or the
    payload's end), so that its checksums can be checked, and may be cut there; else at multiples of
    `grain`.  No byte is in two of them.
    """
    found: list[list[int]] = []
    inside: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        start, end = span.start, span.end
        if block:
            start -= start % block
            end = min(end + -end % block, nbytes)
        if found and start <= found[-1][1]:
            found[-1][1] = max(found[-1][1], end)
            inside[-1].append(span)
        else:
            found.append([start, end])
            inside.append([span])
    return [
        FileRange(origin + start, origin + end, entry, origin, tuple(wanted), block or grain)
        for (start, end), wanted in zip(found, inside, strict=True)
    ]


def coalesce(
    wanted: Iterable[tuple[str, FileRange]],
    *,
    max_gap_bytes: int,
    max_bytes: int,
    max_waste: float = 0.02,
) -> list[Fetch]:
    """Requests for (file, range) pairs, by file, then offset; neighbours are read as one.

    A request holds about `max_bytes`, at most a sixteenth more, or one range that cannot be cut
    there: longer ranges are cut, also to fill a request that has room for a quarter of `max_bytes`
    or more.

    Args:
        max_gap_bytes: between ranges that are read as one.
        max_waste: share of a request that may be gaps, which are read and thrown away (or
            `max_gap_bytes`, where the request is small): so that closing gaps cannot cost more
            than it saves.
    """
    requests: list[_Request] = []
    for name, file_range in sorted(wanted, key=lambda pair: (pair[0], pair[1].start)):
        fills = bool(requests) and requests[-1].takes(
            name, file_range, max_gap_bytes=max_gap_bytes, max_bytes=max_bytes, max_waste=max_waste
        )
        if not fills:
            requests.append(_Request(name))
        begin = requests[-1].start if fills else file_range.start
        places = _cuts(file_range, begin, fills=fills, max_bytes=max_bytes)
        first, *others = file_range.cut(places)
        requests[-1].add(first)
        for other in others:
            requests.append(_Request(name))
            requests[-1].add(other)
    return [request.fetch() for request in requests]


def _most(max_bytes: int) -> int:
    """What a request holds rather than that a little is left for another."""
    return max_bytes + max_bytes // 16


def _cuts(file_range: FileRange, begin: int, *, fills: bool, max_bytes: int) -> list[int]:
    """Where to cut a range that goes into a request from `begin` on, and into others after it.

    The first part, where it `fills` up what lies before it, may be longer; the others are of
    `max_bytes`, and of one grain at least.
    """
    places: list[int] = []
    grain = file_range.grain
    while grain and file_range.end - begin > _most(max_bytes):
        if fills and not places:
            place = file_range.last_cut(begin + _most(max_bytes))
        else:
            next_cut = begin + grain - (begin - file_range.origin) % grain
            place = max(file_range.last_cut(begin + max_bytes), next_cut)
        if place >= file_range.end:
            break
        places.append(place)
        begin = place
    return places


@dataclass
class _Request:
    """A request that is being put together: ranges of one file that follow one another."""

    name: str
    ranges: list[FileRange] = field(default_factory=list)
    wasted: int = 0  # bytes between them

    @property
    def start(self) -> int:
        return self.ranges[0].start

    @property
    def end(self) -> int:
        return self.ranges[-1].end

    def takes(
        self,
        name: str,
        file_range: FileRange,
        *,
        max_gap_bytes: int,
        max_bytes: int,
        max_waste: float,
    ) -> bool:
        """Whether it may go on with this range, or a part of it."""
        if name != self.name:
            return False
        end = file_range.end
        if end - self.start > _most(max_bytes):
            end = file_range.last_cut(self.start + _most(max_bytes))
            if end - file_range.start < max_bytes // 4:
                return False
        gap = file_range.start - self.end
        allowed = max(max_waste * (end - self.start), max_gap_bytes)
        return 0 <= gap <= max_gap_bytes and (not gap or self.wasted + gap <= allowed)

    def add(self, file_range: FileRange) -> None:
        if self.ranges:
            self.wasted += file_range.start - self.end
        self.ranges.append(file_range)

    def fetch(self) -> Fetch:
        return Fetch(self.name, self.start, self.end, tuple(self.ranges))
