"""What one rank reads for others, and which messages it sends and receives: plain values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.planner import ReadItem

from dcp_fsdp_osd.compact import Numbers, numbers
from dcp_fsdp_osd.exchange.regions import Part

__all__ = ["Message", "RankSchedule", "ReadForOthers", "Source"]


class ReadForOthers(NamedTuple):
    """A read into memory of its own, of ``dtype`` (None for an object).

    ``item`` goes by a name that none of the rank's own reads has.
    """

    item: ReadItem
    dtype: torch.dtype | None


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
        members: participants that send or receive it, ascending; as :func:`numbers` has them.
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

    members: Numbers
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
        ranks: global rank of each participant; as :func:`numbers` has them.
        rounds: its messages; all participants have equally many rounds, some of them empty.
        alone: for a read of which something is exchanged: the parts that this rank reads for
            itself.
        reads: what it reads of what is exchanged: parts of its own reads, or reads for others.
    """

    number: int
    ranks: Numbers
    rounds: tuple[tuple[Message, ...], ...]
    alone: dict[int, tuple[Part, ...]]
    reads: tuple[Part | ReadForOthers, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        """Of numbers: an object for each part would take ten times as long, and twice the room."""
        rounds = tuple(tuple(map(_of_message, messages)) for messages in self.rounds)
        alone = numbers(sorted(item for item, parts in self.alone.items() if not parts))
        parts = [_plain(each) for each in self.alone.values() if each]
        reads = _plain(self.reads)
        return _schedule, ((self.number, self.ranks, rounds, alone, parts, reads),)


_Plain = int | tuple[int, tuple[int, ...], tuple[int, ...] | None]


def _plain(reads: Iterable[Part | ReadForOthers]) -> tuple[_Plain | ReadForOthers, ...]:
    return tuple(
        [
            read
            if isinstance(read, ReadForOthers)
            else (read.item if read.offsets is None else (read.item, read.offsets, read.sizes))
            for read in reads
        ]
    )


def _of_source(source: Source) -> _Plain:
    if source.offsets is None or source.sizes is None:
        return source.read
    return source.read, source.offsets, source.sizes


def _of_message(message: Message) -> tuple[Any, ...]:
    return (
        message.members,
        message.root,
        message.tag,
        message.nbytes,
        message.cuda,
        message.objects,
        _plain(message.parts),
        numbers(message.needs),
        tuple(map(_of_source, message.sources)),
    )


def _part(plain: _Plain) -> Part:
    return Part(plain) if isinstance(plain, int) else Part(*plain)


def _parts(plain: Iterable[_Plain]) -> tuple[Part, ...]:
    return tuple(map(_part, plain))


def _schedule(plain: tuple[Any, ...]) -> RankSchedule:
    number, ranks, rounds, alone, parts, reads = plain
    some = {found[0].item: found for found in map(_parts, parts)}
    return RankSchedule(
        number,
        ranks,
        tuple(tuple(map(_message, messages)) for messages in rounds),
        dict.fromkeys(alone, ()) | some,
        tuple(r if isinstance(r, ReadForOthers) else _part(r) for r in reads),
    )


def _message(plain: tuple[Any, ...]) -> Message:
    members, root, tag, nbytes, cuda, objects, parts, needs, sources = plain
    found = (Source(each) if isinstance(each, int) else Source(*each) for each in sources)
    return Message(
        members, root, tag, nbytes, cuda, objects, _parts(parts), tuple(needs), tuple(found)
    )
