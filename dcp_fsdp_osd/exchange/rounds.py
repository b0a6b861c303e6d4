"""Streams of bytes cut into messages, and messages put into rounds.  Pure: no IO, no process group.

A *stream* is everything that one set of ranks wants alike, in file order.  It is cut into equal
runs, one for each rank that reads of it; a run is sent in messages of bounded size; messages go in
rounds, in which no rank sends and receives more than a bound.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from dcp_fsdp_osd.compact import Numbers, numbers
from dcp_fsdp_osd.exchange.reads import Ints
from dcp_fsdp_osd.exchange.regions import Regions
from dcp_fsdp_osd.layout.geometry import Box

__all__ = ["Chunk", "Draft", "Run", "Sizes", "Stream", "chunk_steps", "rounds", "steps"]

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


@dataclass(frozen=True)
class Run:
    """Elements of regions, in a row: for each, those from ``start`` to ``stop``.

    ``region`` are numbers of ``regions``; all three are columns, equally long.
    """

    regions: Regions
    region: Ints
    start: Ints
    stop: Ints

    @staticmethod
    def of(regions: Regions, region: Ints) -> Run:
        """All of some regions."""
        return Run(regions, region, np.zeros_like(region), regions.numel[region])

    @cached_property
    def sizes(self) -> Ints:
        """Bytes of each."""
        sizes: Ints = (self.stop - self.start) * self.regions.itemsize[self.region]
        return sizes

    @cached_property
    def nbytes(self) -> int:
        return int(self.sizes.sum())

    @cached_property
    def files(self) -> set[int]:
        return set(self.regions.file[self.region].tolist())

    def part(self, begin: int, end: int, start: int, stop: int | None = None) -> Run:
        """Some of it: ``start`` is the first element of the first region, ``stop`` of the last."""
        first, last = self.start[begin:end].copy(), self.stop[begin:end].copy()
        first[:1] = start
        if stop is not None:
            last[-1:] = stop
        return Run(self.regions, self.region[begin:end], first, last)

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        columns = self.region.tolist(), self.start.tolist(), self.stop.tolist()
        return zip(*columns, strict=True)


@dataclass
class Stream:
    """Attributes:
    classes: that want it, ascending.
    wanting: who gets it, ascending.
    readers: who may read of it, in the order in which runs are given out.
    cuda: all destinations are on CUDA devices.
    objects: it is of objects, not of tensors.
    whole: it is of chunks that are read whole, by one reader, into memory of their own.
    """

    classes: tuple[int, ...]
    wanting: Numbers
    readers: tuple[int, ...]
    cuda: bool
    objects: bool
    whole: bool = False
    _members: dict[int, Numbers] = field(default_factory=dict)

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

    ``number`` is what its regions have; ``regions``: who wants them, and which they are.
    """

    root: int
    number: int
    box: Box
    nbytes: int
    regions: Sequence[tuple[Stream, int]]


@dataclass(frozen=True)
class Draft:
    """A message, before its members are given theirs."""

    stream: Stream
    root: int
    run: Run

    @property
    def nbytes(self) -> int:
        return self.run.nbytes

    @property
    def members(self) -> Numbers:
        return self.stream.members(self.root)


Steps = list[list[Draft]]
"""Messages of one stream: a list for each time that it has its turn."""


def steps(streams: Sequence[tuple[Stream, Run]], reads_parts: bool, sizes: Sizes) -> list[Steps]:
    """For each stream its steps, of ``sizes.round`` bytes at most; readers take turns.

    Streams are given out to readers by their bytes, the largest first.
    """
    readers = _Readers()
    totals = [run.nbytes for _, run in streams]
    found: dict[int, Steps] = {}
    for k in sorted(range(len(streams)), key=lambda k: (-totals[k], k)):
        (stream, all_of_it), total = streams[k], totals[k]
        count = min(max(-(-total // sizes.reader), 1), len(stream.readers))
        cut = _even_runs if reads_parts and total else _runs_of_regions
        roots = readers.choose(stream, all_of_it, count)
        runs = dict(zip(roots, cut(all_of_it, count, sizes.block), strict=True))
        for root, run in runs.items():
            readers.give(root, run)
        found[k] = _turns(stream, runs, sizes)
    return [found[k] for k in range(len(streams))]


class _Readers:
    """What each rank has been given to read so far."""

    def __init__(self) -> None:
        self._load: dict[int, int] = {}
        self._files: dict[int, set[int]] = {}

    def choose(self, stream: Stream, run: Run, count: int) -> tuple[int, ...]:
        """So many of a stream's readers, in the stream's order.

        Those that read its files anyway (some clients read ahead in each file that they open),
        then those that read least.
        """
        if count == len(stream.readers):
            return stream.readers
        files = run.files
        known = {n: len(files & self._files.get(n, set())) for n in stream.readers}
        order = sorted(stream.readers, key=lambda n: (-known[n], self._load.get(n, 0), n))
        best = set(order[:count])
        return tuple(n for n in stream.readers if n in best)

    def give(self, root: int, run: Run) -> None:
        self._load[root] = self._load.get(root, 0) + run.nbytes
        self._files.setdefault(root, set()).update(run.files)


def _turns(stream: Stream, runs: dict[int, Run], sizes: Sizes) -> Steps:
    """The messages of each reader's run, in steps of as many readers as a round has room for."""
    size = min(max(sizes.round // len(runs), sizes.message), sizes.round)
    size = max(size, _ELEMENT)
    queues = [
        [Draft(stream, root, part) for part in _messages(run, size, sizes.block)]
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


def _even_runs(stream: Run, count: int, block: int) -> list[Run]:
    """Cut a stream into ``count`` runs that differ by less than a block and two elements."""
    regions, total = stream.regions, stream.nbytes
    ends = stream.sizes.cumsum()
    begins = ends - stream.sizes
    runs = np.minimum(begins * count // total, count - 1)  # each region's first
    cut = (runs < count - 1) & (total * (runs + 1) // count < ends)
    pieces = []
    for n in cut.nonzero()[0].tolist():
        region, start, numel = int(stream.region[n]), 0, int(stream.stop[n])
        for run in range(int(runs[n]), count):
            border = total * (run + 1) // count - int(begins[n])
            last = run == count - 1
            stop = numel if last else _aligned(regions, region, border, start, block)
            if stop > start:
                pieces.append((n, start, stop, run))
                start = stop
            if stop == numel:
                break
    (whole,) = (~cut).nonzero()
    rows = np.column_stack((whole, np.zeros_like(whole), stream.stop[whole], runs[whole]))
    rows = np.vstack((rows, np.array(pieces, np.int64).reshape(-1, 4)))
    at, start, stop, run = rows[rows[:, 0].argsort(kind="stable")].T
    return _parted(Run(regions, stream.region[at], start, stop), run, count)


def _parted(run: Run, into: Ints, count: int) -> list[Run]:
    """What of a run goes ``into`` which of ``count`` runs, which is ascending."""
    edges = into.searchsorted(np.arange(count + 1)).tolist()
    return [
        Run(run.regions, run.region[a:b], run.start[a:b], run.stop[a:b])
        for a, b in itertools.pairwise(edges)
    ]


def _runs_of_regions(stream: Run, count: int, _block: int) -> list[Run]:
    """Give each region, uncut, to the one of ``count`` runs that its middle lies in.

    Or to that of its file's middle, if the file is hardly longer than a run: clients that cannot
    read parts of a chunk tend to read ahead in a file.
    """
    total, sizes = stream.nbytes, stream.sizes
    starts = sizes.cumsum() - sizes
    _, first, file = np.unique(
        stream.regions.file[stream.region], return_index=True, return_inverse=True
    )
    of_file = np.zeros_like(first)
    np.add.at(of_file, file, sizes)
    small = of_file[file] * count <= total + total // 8
    middle = np.where(small, starts[first][file] + of_file[file] // 2, starts + sizes // 2)
    into = np.minimum(middle * count // max(total, 1), count - 1)
    order = into.argsort(kind="stable")
    return _parted(Run.of(stream.regions, stream.region[order]), into[order], count)


def _messages(run: Run, size: int, block: int) -> Iterator[Run]:
    """Cut a run into messages of at most ``size`` bytes (or one element)."""
    regions, each = run.regions, list(run)
    ends = [0, *run.sizes.cumsum().tolist()]  # of what is before each region, in bytes
    n, start = 0, each[0][1] if each else 0  # where the next message begins
    while n < len(each):
        begin = ends[n] + (start - each[n][1]) * int(regions.itemsize[each[n][0]])
        end = bisect_right(ends, begin + size) - 1  # the first region that does not fit as a whole
        if end == len(each):
            yield run.part(n, end, start)
            return
        region, first, stop = each[end]
        first = start if end == n else first
        itemsize = int(regions.itemsize[region])
        room = begin + size - ends[end] if end > n else size
        cut = min(_aligned(regions, region, first * itemsize + room, first, block), stop)
        if cut == first and end == n:  # not even one block fits: take what does
            cut = min(first + max(room // max(itemsize, 1), 1), stop)
        if cut > first:
            yield run.part(n, end + 1, start, cut)
        else:
            yield run.part(n, end, start)
        n, start = end, cut
        if cut == stop:  # one element, which is more than a message
            n, start = end + 1, each[end + 1][1] if end + 1 < len(each) else 0


def _aligned(regions: Regions, region: int, border: int, start: int, block: int) -> int:
    """The element at byte ``border``, moved down to a block's end; at least ``start``.

    Blocks count from the chunk's first byte where the region is 1-D, else from its own.
    """
    if border >= regions.nbytes[region]:
        return int(regions.numel[region])
    base = regions.base(region)
    byte = (base + border) // block * block - base
    return max(byte // int(regions.itemsize[region]), start)


def chunk_steps(chunks: Iterable[Chunk], regions: Regions, sizes: Sizes) -> list[Steps]:
    """The steps of chunks that are read whole, for each reader in file order.

    They are sent chunk by chunk, or a few small ones together, so that the reader can let go of
    each soon.
    """
    waiting: dict[int, list[Chunk]] = {}
    found: dict[int, Steps] = {}
    for chunk in chunks:
        held = waiting.setdefault(chunk.root, [])
        if held and sum(each.nbytes for each in held) + chunk.nbytes > sizes.round:
            found.setdefault(chunk.root, []).extend(_steps_of(held, regions, sizes))
            held.clear()
        held.append(chunk)
    for root, held in waiting.items():
        found.setdefault(root, []).extend(_steps_of(held, regions, sizes))
    return list(found.values())


def _steps_of(chunks: Sequence[Chunk], regions: Regions, sizes: Sizes) -> Steps:
    """The messages of chunks that are held at once, in steps of ``sizes.round`` bytes."""
    of_streams: dict[int, tuple[Stream, list[int]]] = {}
    for chunk in chunks:
        for stream, region in chunk.regions:
            of_streams.setdefault(id(stream), (stream, []))[1].append(region)
    found: Steps = []
    room = 0
    for stream, those in of_streams.values():
        run = Run.of(regions, np.array(those, np.int64))
        for part in _messages(run, sizes.round, sizes.block):
            draft = Draft(stream, chunks[0].root, part)
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
