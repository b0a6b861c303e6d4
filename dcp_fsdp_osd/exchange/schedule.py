"""Who reads what for whom, and in which order it is handed on.  Pure: no IO, no process group.

:func:`plan_exchange` takes all ranks' reads and gives each rank its part of one schedule.  It is a
function of its arguments alone, so the same reads give the same schedule anywhere; DCP's
coordinator calls it in ``create_global_plan`` and DCP hands each rank its part with the plan.

Everything that one set of ranks wants alike is a *stream* of bytes, in file order, cut into equal
runs, one for each rank that reads of it: bytes are balanced, files have few readers, large tensors
are cut and small ones come together by construction (:mod:`dcp_fsdp_osd.exchange.rounds`).

Where storage readers can only read a saved chunk whole, and ranks want different parts of it, one
rank reads it once, into memory of its own, and hands each its part.

How it compares: torch's ``load_planner`` has every rank read all that it wants;
ByteCheckpoint (arXiv 2407.20143, section 4.1) also reads once, and then sends tensor by tensor.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem

from dcp_fsdp_osd.exchange.regions import Atom, Part, Participant, find_atoms
from dcp_fsdp_osd.exchange.rounds import Draft, Sizes, Stream, Unit, chunk_steps, rounds, steps
from dcp_fsdp_osd.layout.geometry import Box

__all__ = ["ExchangePlan", "Message", "RankSchedule", "Source", "plan_exchange"]


_SIZES = Sizes()


@dataclass(frozen=True)
class Source:
    """A box of what a rank has read, relative to that read's own box; None: all of it.

    ``read`` is its number among :attr:`RankSchedule.reads`.
    """

    read: int
    offsets: tuple[int, ...] | None = None
    sizes: tuple[int, ...] | None = None


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
            for it itself, or has it there already.
        needs: on the root: numbers among :attr:`RankSchedule.reads` that fill it.
        sources: on the root: what it is sent from, in order, if that is not `parts`, which then
            it fills here too.
    """

    members: tuple[int, ...]
    root: int
    tag: int
    nbytes: int
    cuda: bool
    objects: bool
    parts: tuple[Part, ...] = ()
    needs: tuple[int, ...] = ()
    sources: tuple[Source, ...] = ()


@dataclass(frozen=True)
class RankSchedule:
    """One participant's part of the schedule.

    Attributes:
        number: this participant's, among `ranks`.
        ranks: global rank of each participant.
        rounds: its messages; all participants have equally many rounds, some of them empty.
        alone: for a read of which a part is exchanged: the parts that this rank reads for itself.
        reads: what it reads of what is exchanged: parts of its own reads, or reads into memory of
            their own, with their dtype, under a name that no own read has.
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


def plan_exchange(
    participants: Sequence[Participant],
    metadata: Metadata,
    *,
    reads_parts: bool,
    spread: bool = False,
    sizes: Sizes = _SIZES,
) -> ExchangePlan | None:
    """Plan to read once what several participants want; None if there is nothing of the kind.

    Args:
        participants: all ranks of the load, in the order of its process group.
        metadata: of the checkpoint.
        reads_parts: the storage readers read parts of a saved chunk for the cost of the part.
            Otherwise a chunk of which anything is exchanged is read whole, by one rank.
        spread: let all ranks read, also for others what they do not want themselves (with
            `reads_parts` alone).
        sizes: by how many bytes it is cut.  Objects are not: their sizes are not known yet.

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
    streams: dict[tuple[object, ...], Stream] = {}

    def stream_of(atom: Atom, root: int | None = None) -> Stream | None:
        """The stream that an atom belongs to; None if who wants it reads it for itself alone."""
        wanting = tuple(sorted(n for c, _ in atom.owners for n in members[c]))
        able = wanting if root is None else (root,)
        if root is None:
            able = tuple(n for n in wanting if participants[n].can_read)
            able = readers if spread and reads_parts else able or readers
            if wanting == able and len(wanting) == 1:
                return None
        able = tuple(sorted(able, key=lambda n: (hosts[n], n)))
        key = (wanting, able, atom.cuda, atom.box is None, root is not None)
        if key not in streams:
            streams[key] = Stream(wanting, able, atom.cuda, atom.box is None, root is not None)
        return streams[key]

    found = [stream_of(atom) for atom in atoms]
    if not any(found):
        return None
    cut = {} if reads_parts else _cut_chunks(atoms, found)
    exchanged: set[int] = set()
    for k, (atom, stream) in enumerate(zip(atoms, found, strict=True)):
        if stream is not None and (atom.chunk, atom.dtype) not in cut:
            stream.atoms.append(atom)
            exchanged.add(k)
    queues = steps([s for s in streams.values() if s.atoms], reads_parts, sizes)
    whole = []
    roots: dict[tuple[object, ...], tuple[int, Box]] = {}
    load: dict[int, int] = {}
    for name, those in cut.items():
        box = _around([atoms[k] for k in those])
        wanting = {c for k in those for c, _ in atoms[k].owners}
        candidates = [n for c in wanting for n in members[c] if participants[n].can_read]
        root = min(candidates or readers, key=lambda n: (load.get(n, 0), n))
        nbytes = box.numel * atoms[those[0]].itemsize
        load[root] = load.get(root, 0) + nbytes
        roots[name] = root, box
        parts = [(stream_of(atoms[k], root), atoms[k]) for k in those]
        whole.append((root, nbytes, [(s, atom) for s, atom in parts if s is not None]))
        exchanged.update(those)
    queues += chunk_steps(whole, sizes)
    schedules = _hand_out(classes, members, rounds(queues, sizes.round), reads_parts, roots)
    alone = _alone(classes, atoms, exchanged)
    of_class = {n: c for c, each in enumerate(members) for n in each}
    moved = [atoms[k] for k in exchanged]
    ranks = tuple(p.rank for p in participants)
    return ExchangePlan(
        ranks=tuple(
            RankSchedule(
                n,
                ranks,
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


def _cut_chunks(
    atoms: Sequence[Atom], streams: Sequence[Stream | None]
) -> dict[tuple[object, ...], list[int]]:
    """Chunks that ranks want different parts of, some of which are exchanged: their atoms."""
    chunks: dict[tuple[object, ...], list[int]] = {}
    for k, atom in enumerate(atoms):
        if atom.box is not None:
            chunks.setdefault((atom.chunk, atom.dtype), []).append(k)
    return {
        name: those
        for name, those in chunks.items()
        if len(those) > 1 and any(streams[k] is not None for k in those)
    }


def _around(atoms: Sequence[Atom]) -> Box:
    """The smallest box that holds the boxes of all ``atoms``."""
    boxes = [atom.box for atom in atoms if atom.box is not None]
    low = [min(each) for each in zip(*(box.offsets for box in boxes), strict=True)]
    ends = [[a + n for a, n in zip(box.offsets, box.sizes, strict=True)] for box in boxes]
    high = [max(each) for each in zip(*ends, strict=True)]
    return Box(tuple(low), tuple(b - a for a, b in zip(low, high, strict=True)))


# ------------------------------------------------------------ each rank's part


@dataclass
class _Building:
    rounds: list[list[Message]] = field(default_factory=list)
    reads: list[Part | tuple[ReadItem, torch.dtype | None]] = field(default_factory=list)
    known: dict[object, int] = field(default_factory=dict)  # what is read whole -> its read


def _hand_out(
    classes: Sequence[Participant],
    members: Sequence[Sequence[int]],
    drafted: Sequence[Sequence[Draft]],
    reads_parts: bool,
    roots: dict[tuple[object, ...], tuple[int, Box]],
) -> list[_Building]:
    class_of = {n: c for c, each in enumerate(members) for n in each}
    found = [_Building() for _ in class_of]
    tag = 0
    for drafts in drafted:
        for building in found:
            building.rounds.append([])
        for draft in drafts:
            owners = dict(draft.units[0].atom.owners)
            own = class_of[draft.root] if class_of[draft.root] in owners else None
            building = found[draft.root]
            direct = own is not None and not draft.stream.whole
            if draft.stream.whole:
                sources = _chunk_sources(draft.units, building, classes, roots)
            else:
                sources = _root_reads(draft.units, building, own, classes, reads_parts)
            plain = Message(
                draft.members,
                draft.root,
                tag,
                draft.nbytes,
                draft.stream.cuda and direct,
                draft.stream.objects,
            )
            told = {
                c: dataclasses.replace(plain, parts=tuple(_parts(draft.units, c, classes[c])))
                for c in owners
            }
            for n in draft.members:
                if n != draft.root:
                    found[n].rounds[-1].append(told[class_of[n]])
            building.rounds[-1].append(
                dataclasses.replace(
                    told.get(class_of[draft.root], plain),
                    needs=tuple(dict.fromkeys(source.read for source in sources)),
                    sources=() if direct else tuple(sources),
                )
            )
            tag += 1
    return found


def _parts(units: Iterable[Unit], number: int, participant: Participant) -> Iterator[Part]:
    """Where a message belongs in the reads of one class."""
    for unit in units:
        owners = unit.atom.owners
        item = owners[bisect_left(owners, (number, -1))][1]
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
    units: Iterable[Unit],
    root: _Building,
    own: int | None,
    classes: Sequence[Participant],
    reads_parts: bool,
) -> list[Source]:
    """Add what the root (of class `own`, or with no use for it) reads for a message.

    Returns what the message consists of.
    """
    sources: list[Source] = []
    for unit in units:
        atom = unit.atom
        number = atom.owners[0][0] if own is None else own
        if atom.box is None or not reads_parts:
            read = root.known.get(id(atom))
            if read is None:
                everything = unit if atom.box is None else Unit(atom, 0, atom.box.numel)
                (part,) = _parts([everything], number, classes[number])
                read = root.known[id(atom)] = _add(root, part, own, atom, classes[number])
            if atom.box is None:
                sources.append(Source(read))
            else:
                sources += [Source(read, box.offsets, box.sizes) for box in unit.boxes()]
            continue
        for part in _parts([unit], number, classes[number]):
            sources.append(Source(_add(root, part, own, atom, classes[number])))
    return sources


def _add(root: _Building, part: Part, own: int | None, atom: Atom, participant: Participant) -> int:
    root.reads.append(part if own is not None else (_apart(part.of(participant.items)), atom.dtype))
    return len(root.reads) - 1


def _chunk_sources(
    units: Iterable[Unit],
    root: _Building,
    classes: Sequence[Participant],
    roots: dict[tuple[object, ...], tuple[int, Box]],
) -> list[Source]:
    """The same for chunks that are read whole, into memory of their own."""
    sources: list[Source] = []
    for unit in units:
        atom = unit.atom
        assert atom.box is not None
        name = (atom.chunk, atom.dtype)
        _, around = roots[name]
        if name not in root.known:
            number, item = atom.owners[0]
            like = classes[number].items[item]
            size = torch.Size(around.sizes)
            whole = dataclasses.replace(
                like,
                dest_offsets=torch.Size([0] * len(size)),
                storage_offsets=torch.Size(around.offsets),
                lengths=size,
            )
            root.known[name] = len(root.reads)
            root.reads.append((_apart(whole), atom.dtype))
        base = [a - b for a, b in zip(atom.box.offsets, around.offsets, strict=True)]
        sources += [
            Source(root.known[name], box.shifted(base).offsets, box.sizes) for box in unit.boxes()
        ]
    return sources


def _apart(item: ReadItem) -> ReadItem:
    """``item`` under a name that tells it from the rank's own reads."""
    index = item.dest_index
    return dataclasses.replace(
        item, dest_index=MetadataIndex(f"{index.fqn} (handed on)", index.offset)
    )


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
