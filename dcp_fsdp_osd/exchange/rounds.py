"""Streams of bytes cut into messages, and messages put into rounds.  Pure: no IO, no process group.

A *stream* is everything that one set of ranks wants alike, in file order.  It is cut into equal
runs, one for each rank that reads of it; a run is sent in messages of bounded size; messages go in
rounds, in which no rank sends and receives more than a bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dcp_fsdp_osd.exchange.regions import Atom
from dcp_fsdp_osd.layout.geometry import Box, boxes_of_interval

__all__ = ["Draft", "Sizes", "Stream", "Unit", "chunk_steps", "rounds", "steps"]


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


class Unit(NamedTuple):
    """Elements ``[start, stop)`` of an atom, in the row-major order of its box."""

    atom: Atom
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * self.atom.itemsize

    def boxes(self) -> list[Box]:
        assert self.atom.box is not None
        return boxes_of_interval(self.atom.box.sizes, self.start, self.stop)


@dataclass
class Stream:
    """Attributes:
    wanting: who gets it, ascending.
    readers: who may read of it, in the order in which runs are given out.
    cuda: all destinations are on CUDA devices.
    objects: it is of objects, not of tensors.
    whole: it is of chunks that are read whole, by one reader, into memory of their own.
    """

    wanting: tuple[int, ...]
    readers: tuple[int, ...]
    cuda: bool
    objects: bool
    whole: bool = False
    atoms: list[Atom] = field(default_factory=list)
    _members: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def members(self, root: int) -> tuple[int, ...]:
        """Who takes part in a message of ``root``: one and the same value for all of them."""
        found = self._members.get(root)
        if found is None:
            found = self.wanting
            if root not in found:
                found = tuple(sorted((*found, root)))
            self._members[root] = found
        return found


@dataclass
class Draft:
    """A message, before it is told to its members."""

    stream: Stream
    root: int
    units: list[Unit]
    nbytes: int = 0

    def __post_init__(self) -> None:
        self.nbytes = sum(unit.nbytes for unit in self.units)

    @property
    def members(self) -> tuple[int, ...]:
        return self.stream.members(self.root)


Steps = list[list[Draft]]
"""Messages of one stream: a list for each time that it has its turn."""


def steps(streams: Iterable[Stream], reads_parts: bool, sizes: Sizes) -> list[Steps]:
    """For each stream its steps, of ``sizes.round`` bytes at most; readers take turns.

    Small streams, which few ranks read, go to ranks that read their files anyway (some clients
    read ahead in each file that they open), then to those that read least.
    """
    load: dict[int, int] = {}
    files: dict[int, set[str]] = {}
    found: dict[int, Steps] = {}
    totals = [(sum(atom.nbytes for atom in stream.atoms), stream) for stream in streams]
    for k in sorted(range(len(totals)), key=lambda k: (-totals[k][0], k)):
        total, stream = totals[k]
        count = min(max(-(-total // sizes.reader), 1), len(stream.readers))
        chosen = stream.readers
        if count < len(chosen):
            own = {atom.where[0] for atom in stream.atoms}
            known = {n: len(own & files.get(n, set())) for n in chosen}
            best = sorted(chosen, key=lambda n: (-known[n], load.get(n, 0), n))[:count]
            chosen = tuple(n for n in stream.readers if n in set(best))
        runs = _runs(stream.atoms, total, count, reads_parts, sizes.block)
        size = max(min(max(sizes.round // count, sizes.message), sizes.round), _ELEMENT)
        queues = []
        for root, run in zip(chosen, runs, strict=True):
            load[root] = load.get(root, 0) + sum(unit.nbytes for unit in run)
            files.setdefault(root, set()).update(unit.atom.where[0] for unit in run)
            queues.append(
                [Draft(stream, root, units) for units in _messages(run, size, sizes.block)]
            )
        together = max(sizes.round // size, 1)
        turns = [queues[first : first + together] for first in range(0, count, together)]
        longest = max(len(queue) for queue in queues)
        taken = (
            [queue[i] for queue in turn if i < len(queue)] for i in range(longest) for turn in turns
        )
        found[k] = [step for step in taken if step]
    return [found[k] for k in range(len(totals))]


def _runs(
    atoms: Sequence[Atom], total: int, count: int, reads_parts: bool, block: int
) -> list[list[Unit]]:
    """Cut a stream into ``count`` runs of about equally many bytes.

    With `reads_parts` each differs from the average by less than a block and two elements; without,
    chunks go to the run that their middle lies in, or that of their file if that is no longer than
    a run (clients that cannot read parts of a chunk tend to read ahead in a file).
    """
    runs: list[list[Unit]] = [[] for _ in range(count)]
    position = 0
    files: dict[str, tuple[int, int]] = {}  # first byte in the stream, and bytes
    if not reads_parts:
        for atom in atoms:
            first, size = files.get(atom.where[0], (position, 0))
            files[atom.where[0]] = first, size + atom.nbytes
            position += atom.nbytes
        position = 0
    for atom in atoms:
        numel = 1 if atom.box is None else atom.box.numel
        size = atom.nbytes
        if not reads_parts or not total:
            first, length = files.get(atom.where[0], (position, size))
            if length * count > total + total // 8:
                first, length = position, size
            middle = (first + length // 2) * count // total if total else 0
            runs[min(middle, count - 1)].append(Unit(atom, 0, numel))
        else:
            start = 0
            first = min(position * count // total, count - 1)
            for run in range(first, count):
                border = total * (run + 1) // count - position
                stop = numel if run == count - 1 else _aligned(atom, border, start, block)
                if stop > start:
                    runs[run].append(Unit(atom, start, stop))
                    start = stop
                if stop == numel:
                    break
        position += size
    return runs


def _messages(run: Sequence[Unit], size: int, block: int) -> Iterator[list[Unit]]:
    """Cut a run into messages of at most ``size`` bytes (or one element)."""
    units: list[Unit] = []
    room = size
    for atom, first, stop in run:
        start = first
        while (stop - start) * atom.itemsize > room:
            cut = min(_aligned(atom, start * atom.itemsize + room, start, block), stop)
            if cut > start:
                units.append(Unit(atom, start, cut))
                start = cut
            elif not units:  # not even one block fits: take what does
                cut = min(start + max(room // max(atom.itemsize, 1), 1), stop)
                units.append(Unit(atom, start, cut))
                start = cut
            yield units
            units, room = [], size
        if start < stop:
            units.append(Unit(atom, start, stop))
            room -= (stop - start) * atom.itemsize
    if units:
        yield units


def _aligned(atom: Atom, border: int, start: int, block: int) -> int:
    """The element of ``atom`` at byte ``border``, moved down to a block's end; at least ``start``.

    Blocks count from the chunk's first byte where the atom is 1-D, else from its own.
    """
    box = atom.box
    assert box is not None
    base = 0  # in the chunk
    if len(box.offsets) == 1:
        base = box.offsets[0] * atom.itemsize
    if border >= atom.nbytes:
        return box.numel
    byte = (base + border) // block * block - base
    return max(byte // atom.itemsize, start)


def chunk_steps(
    chunks: Iterable[tuple[int, int, Sequence[tuple[Stream, Atom]]]], sizes: Sizes
) -> list[Steps]:
    """The steps of chunks that are read whole and handed on in parts.

    Args:
        chunks: for each, in file order, the rank that reads it, the bytes that it holds, and the
            parts: who wants them.  They are sent chunk by chunk, or a few small ones together, so
            that the reader can let go of each soon.
    """
    waiting: dict[int, list[tuple[Stream, Atom]]] = {}
    held: dict[int, int] = {}
    found: dict[int, Steps] = {}

    def flush(root: int) -> None:
        units: dict[int, list[Unit]] = {}
        streams: dict[int, Stream] = {}
        for stream, atom in waiting.pop(root, []):
            assert atom.box is not None
            streams[id(stream)] = stream
            units.setdefault(id(stream), []).append(Unit(atom, 0, atom.box.numel))
        step: list[Draft] = []
        room = sizes.round
        for number, run in units.items():
            for message in _messages(run, sizes.round, sizes.block):
                draft = Draft(streams[number], root, message)
                if step and draft.nbytes > room:
                    found.setdefault(root, []).append(step)
                    step, room = [], sizes.round
                step.append(draft)
                room -= draft.nbytes
        if step:
            found.setdefault(root, []).append(step)
        held[root] = 0

    for root, nbytes, parts in chunks:
        if held.get(root, 0) + nbytes > sizes.round:
            flush(root)
        waiting.setdefault(root, []).extend(parts)
        held[root] = held.get(root, 0) + nbytes
    for root in list(waiting):
        flush(root)
    return list(found.values())


def rounds(queues: Sequence[Steps], round_bytes: int) -> list[list[Draft]]:
    """Put the steps of each queue, in order, into the first rounds that have room for them.

    In no round does a rank send and receive more than ``round_bytes`` (or one element, if that is
    more).  Objects come last: their sizes are not known before they are read.
    """
    found: list[list[Draft]] = []
    loads: list[dict[int, int]] = []
    last = [0] * len(queues)
    objects: list[Draft] = []
    for k in range(max((len(queue) for queue in queues), default=0)):
        for q, queue in enumerate(queues):
            if k >= len(queue):
                continue
            if queue[k][0].stream.objects:
                objects += queue[k]
                continue
            need: dict[int, int] = {}
            for draft in queue[k]:
                for n in draft.members:
                    need[n] = need.get(n, 0) + draft.nbytes
            r = last[q]
            while r < len(found) and any(
                loads[r].get(n, 0) + more > round_bytes for n, more in need.items() if n in loads[r]
            ):
                r += 1
            if r == len(found):
                found.append([])
                loads.append({})
            found[r] += queue[k]
            for n, more in need.items():
                loads[r][n] = loads[r].get(n, 0) + more
            last[q] = r
    return [*found, objects] if objects else found
