"""What one rank reads for others, and which messages it sends and receives: plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.planner import ReadItem

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
        alone: for a read of which something is exchanged: the parts that this rank reads for
            itself.
        reads: what it reads of what is exchanged: parts of its own reads, or reads for others.
    """

    number: int
    ranks: tuple[int, ...]
    rounds: tuple[tuple[Message, ...], ...]
    alone: dict[int, tuple[Part, ...]]
    reads: tuple[Part | ReadForOthers, ...]
