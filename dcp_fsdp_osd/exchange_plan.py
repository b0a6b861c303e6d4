"""Who reads what for whom, and in which order it is handed on.  Pure: no IO, no process group.

:func:`plan_exchange` takes all ranks' reads and gives each rank its part of one schedule.  It is a
function of its arguments alone, so the same reads give the same schedule anywhere; DCP's
coordinator calls it in ``create_global_plan`` and DCP hands each rank its part with the plan.

Everything that one set of ranks wants alike is a *stream* of bytes, in file order.  It is cut
into equal runs, one for each rank that reads of it: bytes are balanced, files have few readers,
large tensors are cut and small ones come together by construction.  A run is sent in messages of
bounded size; messages go in rounds, in which no rank sends and receives more than a bound.

How it compares: torch's ``load_planner`` has every rank read all that it wants;
ByteCheckpoint (arXiv 2407.20143, section 4.1) also reads once, and then sends tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from .geometry import Box, boxes_of_interval
from .shared_reads import Atom, Part, Participant, find_atoms

__all__ = ["ExchangePlan", "Message", "RankSchedule", "plan_exchange"]

ROUND_BYTES = 32 << 20
"""What one rank sends and receives in one round, at most."""
BATCH_BYTES = 6 << 20
"""Streams get one reader for each so many bytes, up to all of their readers."""
_ALIGN = 1 << 20  # runs and messages are cut at multiples: the largest block of a checksum
_SMALLEST = 1 << 20  # message, however many readers share a round


@dataclass(frozen=True)
class Message:
    """Bytes that one rank has read, on their way to all who want them.

    Attributes:
        members: participants that send or receive it, ascending.
        root: the one that has read it.
        tag: its number among all messages.
        nbytes: its size; 0 for objects, whose size is not known before they are read.
        cuda: all destinations are on CUDA devices.
        objects: what is sent are objects' bytes.
        parts: where it belongs in this rank's reads, in order; empty for a root that has no use
            for it itself.
        needs: on the root: numbers among :attr:`RankSchedule.reads` that fill it.
    """

    members: tuple[int, ...]
    root: int
    tag: int
    nbytes: int
    cuda: bool
    objects: bool
    parts: tuple[Part, ...] = ()
    needs: tuple[int, ...] = ()


@dataclass(frozen=True)
class RankSchedule:
    """One participant's part of the schedule.

    Attributes:
        number: this participant's, among `ranks`.
        ranks: global rank of each participant.
        rounds: its messages; all participants have equally many rounds, some of them empty.
        alone: for a read of which a part is exchanged: the parts that this rank reads for itself.
        reads: what it reads of what is exchanged: parts of its own reads, or reads for others
            alone, with their dtype.
    """

    number: int
    ranks: tuple[int, ...]
    rounds: tuple[tuple[Message, ...], ...]
    alone: dict[int, tuple[Part, ...]]
    reads: tuple[Part | tuple[ReadItem, torch.dtype | None], ...]

    def describe(self) -> str:
        """A line for each message, for people."""
        lines = [f"rank {self.ranks[self.number]}: reads {len(self.reads)} parts for others too"]
        for i, messages in enumerate(self.rounds):
            lines += [
                f"  round {i}: {self.ranks[m.root]} -> "
                f"{','.join(str(self.ranks[r]) for r in m.members if r != m.root)}: "
                + ("objects" if m.objects else f"{m.nbytes} bytes")
                for m in messages
            ]
        return "\n".join(lines)


@dataclass(frozen=True)
class ExchangePlan:
    """The whole schedule.

    Attributes:
        ranks: one schedule for each participant.
        unique: bytes of tensors that are exchanged, each counted once.
        spared: bytes that need not be read from storage because of it.
        hosts: how many machines the members of the most widespread stream are on.
    """

    ranks: tuple[RankSchedule, ...]
    unique: int
    spared: int
    hosts: int


class _Unit(NamedTuple):
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
class _Stream:
    wanting: tuple[int, ...]
    readers: tuple[int, ...]
    cuda: bool
    objects: bool
    atoms: list[Atom] = field(default_factory=list)


@dataclass
class _Draft:
    """A message, before it is told to its members."""

    stream: _Stream
    root: int
    units: list[_Unit]

    @property
    def nbytes(self) -> int:
        return sum(unit.nbytes for unit in self.units)

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(sorted({*self.stream.wanting, self.root}))


def plan_exchange(
    participants: Sequence[Participant],
    metadata: Metadata,
    *,
    reads_parts: bool,
    spread: bool = False,
    round_bytes: int = ROUND_BYTES,
) -> ExchangePlan | None:
    """Plan to read once what several participants want; None if there is nothing of the kind.

    Args:
        participants: all ranks of the load, in the order of its process group.
        metadata: of the checkpoint.
        reads_parts: the storage readers read parts of a saved chunk for the cost of the part.
            Otherwise a chunk is read whole, by one rank.
        spread: let all ranks read, also for others what they do not want themselves (with
            `reads_parts` alone).
        round_bytes: bound of what a rank sends and receives in one round.

    Raises:
        ValueError: something is wanted, and no participant can read.
    """
    readers = tuple(n for n, p in enumerate(participants) if p.can_read)
    if not readers:
        raise ValueError("expected at least one rank that can read, found none")
    numbers: dict[bytes, list[int]] = {}
    for n, p in enumerate(participants):
        numbers.setdefault(p.digest or str(n).encode(), []).append(n)
    members = list(numbers.values())
    classes = [participants[each[0]] for each in members]
    atoms = find_atoms(classes, metadata)
    hosts = [p.host for p in participants]
    streams: dict[tuple[object, ...], _Stream] = {}
    exchanged: set[int] = set()
    for k, atom in enumerate(atoms):
        wanting = tuple(sorted(n for c, _ in atom.owners for n in members[c]))
        able = (
            readers
            if spread and reads_parts
            else tuple(n for n in wanting if participants[n].can_read)
        )
        able = able or readers
        if wanting == able and len(wanting) == 1:
            continue
        exchanged.add(k)
        able = tuple(sorted(able, key=lambda n: (hosts[n], n)))
        key = (wanting, able, atom.cuda, atom.box is None)
        stream = streams.setdefault(key, _Stream(wanting, able, atom.cuda, atom.box is None))
        stream.atoms.append(atom)
    if not exchanged:
        return None
    drafts = _rounds(_steps(streams.values(), reads_parts, round_bytes), round_bytes)
    schedules = _hand_out(classes, members, drafts, reads_parts)
    alone = _alone(classes, atoms, exchanged)
    of_class = {n: c for c, each in enumerate(members) for n in each}
    moved = [atoms[k] for k in exchanged]
    return ExchangePlan(
        ranks=tuple(
            RankSchedule(
                n,
                tuple(p.rank for p in participants),
                tuple(tuple(messages) for messages in schedule.rounds),
                alone.get(of_class[n], {}),
                tuple(schedule.reads),
            )
            for n, schedule in enumerate(schedules)
        ),
        unique=sum(atom.nbytes for atom in moved),
        spared=sum(
            atom.nbytes * (sum(len(members[c]) for c, _ in atom.owners) - 1) for atom in moved
        ),
        hosts=max(len({hosts[n] for n in stream.wanting}) for stream in streams.values()),
    )


# ------------------------------------------------------------ runs and messages


def _steps(
    streams: Iterable[_Stream], reads_parts: bool, round_bytes: int
) -> list[list[list[_Draft]]]:
    """For each stream its steps: the messages that its readers send at the same time."""
    load: dict[int, int] = {}
    found: list[list[list[_Draft]]] = []
    for stream in streams:
        total = sum(atom.nbytes for atom in stream.atoms)
        count = min(max(-(-total // BATCH_BYTES), 1), len(stream.readers))
        chosen = stream.readers
        if count < len(chosen):
            chosen = tuple(sorted(chosen, key=lambda n: (load.get(n, 0), n))[:count])
            chosen = tuple(n for n in stream.readers if n in chosen)
        runs = _runs(stream.atoms, total, count, reads_parts)
        size = max(round_bytes // count, _SMALLEST)
        queues = []
        for root, run in zip(chosen, runs, strict=True):
            load[root] = load.get(root, 0) + sum(unit.nbytes for unit in run)
            queues.append([_Draft(stream, root, units) for units in _messages(run, size)])
        longest = max(len(queue) for queue in queues)
        found.append([[q[k] for q in queues if k < len(q)] for k in range(longest)])
    return found


def _runs(atoms: Sequence[Atom], total: int, count: int, reads_parts: bool) -> list[list[_Unit]]:
    """Cut a stream into ``count`` runs of about equally many bytes."""
    runs: list[list[_Unit]] = [[] for _ in range(count)]
    run_of: dict[tuple[str, tuple[int, ...]], int] = {}  # chunks that are read whole
    position = 0
    for atom in atoms:
        numel = 1 if atom.box is None else atom.box.numel
        size = atom.nbytes
        if not reads_parts or not total:
            middle = (position + size // 2) * count // total if total else 0
            run = run_of.setdefault(atom.chunk, min(middle, count - 1))
            runs[run].append(_Unit(atom, 0, numel))
        else:
            start = 0
            for run in range(count):
                border = total * (run + 1) // count - position
                stop = numel if run == count - 1 else _aligned(atom, border, start)
                if stop > start:
                    runs[run].append(_Unit(atom, start, stop))
                    start = stop
        position += size
    return runs


def _messages(run: Sequence[_Unit], size: int) -> Iterator[list[_Unit]]:
    """Cut a run into messages of at most about ``size`` bytes."""
    units: list[_Unit] = []
    room = size
    for atom, first, stop in run:
        start = first
        while (stop - start) * atom.itemsize > room:
            cut = min(_aligned(atom, start * atom.itemsize + room, start), stop)
            if cut > start:
                units.append(_Unit(atom, start, cut))
                start = cut
            elif not units:  # not even one block fits: take what does
                cut = min(start + max(room // max(atom.itemsize, 1), 1), stop)
                units.append(_Unit(atom, start, cut))
                start = cut
            yield units
            units, room = [], size
        if start < stop:
            units.append(_Unit(atom, start, stop))
            room -= (stop - start) * atom.itemsize
    if units:
        yield units


def _aligned(atom: Atom, border: int, start: int) -> int:
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
    byte = (base + border) // _ALIGN * _ALIGN - base
    return max(byte // atom.itemsize, start)


def _rounds(streams: list[list[list[_Draft]]], round_bytes: int) -> list[list[_Draft]]:
    """Put each stream's steps, in order, into the first rounds that have room for them."""
    rounds: list[list[_Draft]] = []
    loads: list[dict[int, int]] = []
    last = [0] * len(streams)
    objects: list[_Draft] = []
    for k in range(max(len(steps) for steps in streams)):
        for s, steps in enumerate(streams):
            if k >= len(steps):
                continue
            if steps[k][0].stream.objects:
                objects += steps[k]
                continue
            need: dict[int, int] = {}
            for draft in steps[k]:
                for n in draft.members:
                    need[n] = need.get(n, 0) + draft.nbytes
            r = last[s]
            while r < len(rounds) and any(
                loads[r].get(n, 0) + more > round_bytes for n, more in need.items() if n in loads[r]
            ):
                r += 1
            if r == len(rounds):
                rounds.append([])
                loads.append({})
            rounds[r] += steps[k]
            for n, more in need.items():
                loads[r][n] = loads[r].get(n, 0) + more
            last[s] = r
    return [*rounds, objects] if objects else rounds


# ------------------------------------------------------------ each rank's part


@dataclass
class _Building:
    rounds: list[list[Message]] = field(default_factory=list)
    reads: list[Part | tuple[ReadItem, torch.dtype | None]] = field(default_factory=list)
    known: dict[int, int] = field(default_factory=dict)  # atoms that are read whole -> read


def _hand_out(
    classes: Sequence[Participant],
    members: Sequence[Sequence[int]],
    rounds: Sequence[Sequence[_Draft]],
    reads_parts: bool,
) -> list[_Building]:
    class_of = {n: c for c, each in enumerate(members) for n in each}
    found = [_Building() for _ in class_of]
    tag = 0
    for drafts in rounds:
        for building in found:
            building.rounds.append([])
        for draft in drafts:
            owners = dict(draft.units[0].atom.owners)
            parts = {c: tuple(_parts(draft.units, c, classes[c])) for c in owners}
            own = class_of[draft.root] if class_of[draft.root] in owners else None
            needs = _root_reads(draft.units, found[draft.root], own, classes, reads_parts)
            for n in draft.members:
                message = Message(
                    draft.members,
                    draft.root,
                    tag,
                    draft.nbytes,
                    draft.stream.cuda and own is not None,
                    draft.stream.objects,
                    parts.get(class_of[n], ()),
                    needs if n == draft.root else (),
                )
                found[n].rounds[-1].append(message)
            tag += 1
    return found


def _parts(units: Iterable[_Unit], number: int, participant: Participant) -> Iterator[Part]:
    """Where a message belongs in the reads of one class."""
    for unit in units:
        item = dict(unit.atom.owners)[number]
        box = unit.atom.box
        if box is None:
            yield Part(item)
            continue
        read = participant.items[item]
        base = [a - b for a, b in zip(box.offsets, read.storage_offsets, strict=True)]
        for inner in unit.boxes():
            if inner.sizes == tuple(read.lengths):
                yield Part(item)
            else:
                at = tuple(a + b for a, b in zip(base, inner.offsets, strict=True))
                yield Part(item, at, inner.sizes)


def _root_reads(
    units: Iterable[_Unit],
    root: _Building,
    own: int | None,
    classes: Sequence[Participant],
    reads_parts: bool,
) -> tuple[int, ...]:
    """Add what the root (of class `own`, or with no use for it) reads for a message.

    Returns which of its reads the message waits for; for a root with no use for it itself, they
    are the message.
    """
    needs: list[int] = []
    for unit in units:
        atom = unit.atom
        whole = atom.box is None or not reads_parts
        if whole and id(atom) in root.known:
            needs.append(root.known[id(atom)])
            continue
        if whole and atom.box is not None:
            unit = _Unit(atom, 0, atom.box.numel)  # noqa: PLW2901
        number = atom.owners[0][0] if own is None else own
        for part in _parts([unit], number, classes[number]):
            needs.append(len(root.reads))
            read = part.of(classes[number].items)
            root.reads.append(part if own is not None else (read, atom.dtype))
        if whole:
            root.known[id(atom)] = needs[-1]
    return tuple(needs)


def _alone(
    classes: Sequence[Participant], atoms: Sequence[Atom], exchanged: set[int]
) -> dict[int, dict[int, tuple[Part, ...]]]:
    """For reads of which something is exchanged: what is not."""
    found: dict[int, dict[int, list[Part]]] = {}
    for k in exchanged:
        for number, item in atoms[k].owners:
            found.setdefault(number, {}).setdefault(item, [])
    for k, atom in enumerate(atoms):
        mine = atom.again if k in exchanged else (*atom.owners, *atom.again)
        for number, item in mine:
            parts = found.get(number, {}).get(item)
            if parts is None or atom.box is None:
                continue
            read = classes[number].items[item]
            at = tuple(a - b for a, b in zip(atom.box.offsets, read.storage_offsets, strict=True))
            parts.append(Part(item, at, atom.box.sizes))
    return {
        number: {item: tuple(parts) for item, parts in items.items()}
        for number, items in found.items()
    }
