"""Streams of bytes cut into messages, and messages put into rounds.  Pure: no IO, no process group.

A *stream* is everything that one set of ranks wants alike, in file order.  It is cut into equal
runs, one for each rank that reads of it; a run is sent in messages of bounded size; messages go in
rounds, in which no rank sends and receives more than a bound.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dcp_fsdp_osd.compact import Numbers, numbers
from dcp_fsdp_osd.exchange.regions import Region
from dcp_fsdp_osd.layout.geometry import Box, boxes_of_interval

__all__ = ["Chunk", "Draft", "RegionSlice", "Sizes", "Stream", "chunk_steps", "rounds", "steps"]

_ELEMENT = 16  # bytes of the largest


@dataclass(frozen=True)
class Sizes:
    """By how many bytes things are cut.

    Attributes:
        round: what one rank sends and receives in one round, at most (or one element, if that is
            more).
        reader: streams get one reader for each so many bytes, up to all of their readers.
        message: the smallest that messages are made, however many readers a stream has.
        block: runs and messages are cut at multiples: the largest block of a checksum.
    """

    round: int = 32 << 20
    reader: int = 6 << 20
    message: int = 4 << 20
    block: int = 1 << 20


class RegionSlice(NamedTuple):
    """Elements ``[start, stop)`` of a region, in the row-major order of its box."""

    region: Region
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * self.region.itemsize

    def boxes(self) -> list[Box]:
        """In the region's box."""
        assert self.region.box is not None
        return boxes_of_interval(self.region.box.sizes, self.start, self.stop)


@dataclass
class Stream:
    """Attributes:
    wanting: who gets it, ascending.
    readers: who may read of it, in the order in which runs are given out.
    cuda: all destinations are on CUDA devices.
    objects: it is of objects, not of tensors.
    whole: it is of chunks that are read whole, by one reader, into memory of their own.
    """

    wanting: Numbers
    readers: tuple[int, ...]
    cuda: bool
    objects: bool
    whole: bool = False
    regions: list[Region] = field(default_factory=list)
    _members: dict[int, Numbers] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(region.nbytes for region in self.regions)

    def members(self, root: int) -> Numbers:
        """Who takes part in a message of ``root``: one and the same value for all of them."""
        if root not in self._members:
            those = {*self.wanting, root}
            self._members[root] = (
                self.wanting if len(those) == len(self.wanting) else numbers(sorted(those))
            )
        return self._members[root]


@dataclass(frozen=True)
class Chunk:
    """A saved chunk of which ``root`` reads ``box``, the rest not being wanted by anybody.

    ``regions``: who wants them, and what of the chunk they are.
    """

    root: int
    box: Box
    regions: Sequence[tuple[Stream, Region]]

    @property
    def key(self) -> tuple[object, ...]:
        return self.regions[0][1].chunk_key

    @property
    def nbytes(self) -> int:
        return self.box.numel * self.regions[0][1].itemsize


@dataclass
class Draft:
    """A message, before its members are given theirs."""

    stream: Stream
    root: int
    slices: list[RegionSlice]
    nbytes: int = 0

    def __post_init__(self) -> None:
        self.nbytes = sum(each.nbytes for each in self.slices)

    @property
    def members(self) -> Numbers:
        return self.stream.members(self.root)


Steps = list[list[Draft]]
"""Messages of one stream: a list for each time that it has its turn."""


def steps(streams: Sequence[Stream], reads_parts: bool, sizes: Sizes) -> list[Steps]:
    """For each stream its steps, of ``sizes.round`` bytes at most; readers take turns.

    Streams are given out to readers by their bytes, the largest first.
    """
    readers = _Readers()
    totals = [stream.nbytes for stream in streams]
    found: dict[int, Steps] = {}
    for k in sorted(range(len(streams)), key=lambda k: (-totals[k], k)):
        stream, total = streams[k], totals[k]
        count = min(max(-(-total // sizes.reader), 1), len(stream.readers))
        cut = _even_runs if reads_parts and total else _runs_of_regions
        runs = dict(
            zip(readers.choose(stream, count), cut(stream, count, sizes.block), strict=True)
        )
        for root, run in runs.items():
            readers.give(root, run)
        found[k] = _turns(stream, runs, sizes)
    return [found[k] for k in range(len(streams))]


class _Readers:
    """What each rank has been given to read so far."""

    def __init__(self) -> None:
        self._load: dict[int, int] = {}
        self._files: dict[int, set[str]] = {}

    def choose(self, stream: Stream, count: int) -> tuple[int, ...]:
        """So many of a stream's readers, in the stream's order.

        Those that read its files anyway (some clients read ahead in each file that they open),
        then those that read least.
        """
        if count == len(stream.readers):
            return stream.readers
        files = {region.where[0] for region in stream.regions}
        known = {n: len(files & self._files.get(n, set())) for n in stream.readers}
        order = sorted(stream.readers, key=lambda n: (-known[n], self._load.get(n, 0), n))
        best = set(order[:count])
        return tuple(n for n in stream.readers if n in best)

    def give(self, root: int, run: Iterable[RegionSlice]) -> None:
        for each in run:
            self._load[root] = self._load.get(root, 0) + each.nbytes
            self._files.setdefault(root, set()).add(each.region.where[0])


def _turns(stream: Stream, runs: dict[int, list[RegionSlice]], sizes: Sizes) -> Steps:
    """The messages of each reader's run, in steps of as many readers as a round has room for."""
    size = min(max(sizes.round // len(runs), sizes.message), sizes.round)
    size = max(size, _ELEMENT)
    queues = [
        [Draft(stream, root, slices) for slices in _messages(run, size, sizes.block)]
        for root, run in runs.items()
    ]
    together = max(sizes.round // size, 1)
    turns = [queues[first : first + together] for first in range(0, len(queues), together)]
    found = [
        [queue[i] for queue in turn if i < len(queue)]
        for i in range(max(map(len, queues)))
        for turn in turns
    ]
    return [step for step in found if step]


def _even_runs(stream: Stream, count: int, block: int) -> list[list[RegionSlice]]:
    """Cut a stream into ``count`` runs that differ by less than a block and two elements."""
    runs: list[list[RegionSlice]] = [[] for _ in range(count)]
    total, position = stream.nbytes, 0
    for region in stream.regions:
        start = 0
        for run in range(min(position * count // total, count - 1), count):
            border = total * (run + 1) // count - position
            last = run == count - 1
            stop = region.numel if last else _aligned(region, border, start, block)
            if stop > start:
                runs[run].append(RegionSlice(region, start, stop))
                start = stop
            if stop == region.numel:
                break
        position += region.nbytes
    return runs


def _runs_of_regions(stream: Stream, count: int, _block: int) -> list[list[RegionSlice]]:
    """Give each region, uncut, to the one of ``count`` runs that its middle lies in.

    Or to that of its file's middle, if the file is hardly longer than a run: clients that cannot
    read parts of a chunk tend to read ahead in a file.
    """
    runs: list[list[RegionSlice]] = [[] for _ in range(count)]
    total = stream.nbytes
    starts = [0, *itertools.accumulate(region.nbytes for region in stream.regions)]
    files: dict[str, tuple[int, int]] = {}  # first byte in the stream, and bytes
    for region, start in zip(stream.regions, starts, strict=False):
        first, size = files.get(region.where[0], (start, 0))
        files[region.where[0]] = first, size + region.nbytes
    for region, start in zip(stream.regions, starts, strict=False):
        first, size = files[region.where[0]]
        if size * count > total + total // 8:
            first, size = start, region.nbytes
        middle = (first + size // 2) * count // max(total, 1)
        runs[min(middle, count - 1)].append(RegionSlice(region, 0, region.numel))
    return runs


def _messages(run: Sequence[RegionSlice], size: int, block: int) -> Iterator[list[RegionSlice]]:
    """Cut a run into messages of at most ``size`` bytes (or one element)."""
    slices: list[RegionSlice] = []
    room = size
    for region, first, stop in run:
        start = first
        while (stop - start) * region.itemsize > room:
            cut = min(_aligned(region, start * region.itemsize + room, start, block), stop)
            if cut > start:
                slices.append(RegionSlice(region, start, cut))
                start = cut
            elif not slices:  # not even one block fits: take what does
                cut = min(start + max(room // max(region.itemsize, 1), 1), stop)
                slices.append(RegionSlice(region, start, cut))
                start = cut
            yield slices
            slices, room = [], size
        if start < stop:
            slices.append(RegionSlice(region, start, stop))
            room -= (stop - start) * region.itemsize
    if slices:
        yield slices


def _aligned(region: Region, border: int, start: int, block: int) -> int:
    """The element at byte ``border``, moved down to a block's end; at least ``start``.

    Blocks count from the chunk's first byte where the region is 1-D, else from its own.
    """
    box = region.box
    assert box is not None
    base = 0  # in the chunk
    if len(box.offsets) == 1:
        base = box.offsets[0] * region.itemsize
    if border >= region.nbytes:
        return box.numel
    byte = (base + border) // block * block - base
    return max(byte // region.itemsize, start)


def chunk_steps(chunks: Iterable[Chunk], sizes: Sizes) -> list[Steps]:
    """The steps of chunks that are read whole, for each reader in file order.

    They are sent chunk by chunk, or a few small ones together, so that the reader can let go of
    each soon.
    """
    waiting: dict[int, list[Chunk]] = {}
    found: dict[int, Steps] = {}
    for chunk in chunks:
        held = waiting.setdefault(chunk.root, [])
        if held and sum(each.nbytes for each in held) + chunk.nbytes > sizes.round:
            found.setdefault(chunk.root, []).extend(_steps_of(held, sizes))
            held.clear()
        held.append(chunk)
    for root, held in waiting.items():
        found.setdefault(root, []).extend(_steps_of(held, sizes))
    return list(found.values())


def _steps_of(chunks: Sequence[Chunk], sizes: Sizes) -> Steps:
    """The messages of chunks that are held at once, in steps of ``sizes.round`` bytes."""
    runs: dict[int, tuple[Stream, list[RegionSlice]]] = {}
    for chunk in chunks:
        for stream, region in chunk.regions:
            _, run = runs.setdefault(id(stream), (stream, []))
            run.append(RegionSlice(region, 0, region.numel))
    found: Steps = []
    room = 0
    for stream, run in runs.values():
        for slices in _messages(run, sizes.round, sizes.block):
            draft = Draft(stream, chunks[0].root, slices)
            if not found or draft.nbytes > room:
                found.append([])
                room = sizes.round
            found[-1].append(draft)
            room -= draft.nbytes
    return found


def rounds(queues: Sequence[Steps], round_bytes: int) -> list[list[Draft]]:
    """Put the steps of each queue, in order, into the first rounds that have room for them.

    In no round does a rank send and receive more than ``round_bytes`` (or one element, if that is
    more).  Objects come last: their sizes are not known before they are read.
    """
    found: list[_Round] = []
    last = [0] * len(queues)
    objects: list[Draft] = []
    for turn in itertools.zip_longest(*queues):
        for q, step in enumerate(turn):
            if step is None:
                continue
            if step[0].stream.objects:
                objects += step
                continue
            need = _bytes_of_ranks(step)
            while last[q] < len(found) and not found[last[q]].fits(need, round_bytes):
                last[q] += 1
            if last[q] == len(found):
                found.append(_Round())
            found[last[q]].add(step, need)
    drafts = [each.drafts for each in found]
    return [*drafts, objects] if objects else drafts


def _bytes_of_ranks(step: Iterable[Draft]) -> Counter[int]:
    """What each rank sends and receives in a step."""
    need: Counter[int] = Counter()
    for draft in step:
        for n in draft.members:
            need[n] += draft.nbytes
    return need


@dataclass
class _Round:
    drafts: list[Draft] = field(default_factory=list)
    load: Counter[int] = field(default_factory=Counter)  # bytes of each rank

    def fits(self, need: Counter[int], limit: int) -> bool:
        """Ranks that have nothing in this round yet take any one step."""
        return all(self.load[n] + more <= limit for n, more in need.items() if n in self.load)

    def add(self, step: Iterable[Draft], need: Counter[int]) -> None:
        self.drafts += step
        self.load.update(need)
