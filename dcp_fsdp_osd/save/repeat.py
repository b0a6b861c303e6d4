"""Repeated saves plan once: a rank whose plan is as before sends digests of its values alone.

What is sent of a plan are names, boxes and layouts, and digests of values that ranks hold alike. A
rank keeps the hash of the former, and what it was told to write, from save to save.  The
coordinator keeps the ranks' plans and the metadata.  As long as no hash has changed, and the
same values are equal to one another as before, all that was agreed on stands, and is answered with
"as before".  Else the coordinator puts together the plans that the ranks did not send, and all is
planned again.

The memory belongs to a planner, and to a process.  Only what the coordinator has numbered is sent
as before; a rank that did not come to the end of its planning in the last save, because something
failed somewhere, sends its whole plan in the next one.

Stock's plan cache (pytorch#149785) belongs to a class, and compares no values.
"""

from __future__ import annotations

import dataclasses
import uuid
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from dcp_fsdp_osd.errors import LayoutError
from dcp_fsdp_osd.save.report import Share
from dcp_fsdp_osd.save.wire import DIGEST, KeptEntries, Outline, Sent
from dcp_fsdp_osd.save.world import World

_AGAIN, _AS_BEFORE = "dcp_fsdp_osd again", "dcp_fsdp_osd as before"

__all__ = ["Again", "AsBefore", "Kept", "Numbered", "Plans", "unknown"]


class Again(NamedTuple):
    """Sent in place of a plan, which is that of number ``number`` of ``plans``.

    ``digests`` are those of :class:`~dcp_fsdp_osd.save.wire.Sent`, compressed.
    """

    plans: str
    number: int
    digests: bytes

    def sent(self) -> tuple[Any, ...]:
        """As it travels: a pickle with a class in it takes three times as long, of each rank."""
        return (_AGAIN, *self)

    @classmethod
    def read(cls, data: Any) -> Again | None:
        """What :meth:`sent` gave; None if ``data`` is something else."""
        return cls(*data[1:]) if type(data) is tuple and data[:1] == (_AGAIN,) else None


@dataclass(frozen=True)
class Numbered:
    """Answered to a whole plan: the rank's share, and what to call its plan from now on.

    ``entries``: what of its own plan it is to write, where the plan that comes back has no items.
    """

    plans: str
    number: int
    share: Share
    entries: KeptEntries | None = None


class AsBefore(NamedTuple):
    """Answered to :class:`Again`; travels like that."""

    plans: str

    def sent(self) -> tuple[Any, ...]:
        return (_AS_BEFORE, *self)

    @classmethod
    def read(cls, data: Any) -> AsBefore | None:
        return cls(*data[1:]) if type(data) is tuple and data[:1] == (_AS_BEFORE,) else None


@dataclass(frozen=True)
class Kept:
    """What a rank keeps: of its plan ``key``, and what it is to write."""

    plans: str
    number: int
    key: bytes
    items: list[WriteItem]
    share: Share

    def again(self, outline: Outline) -> Again | None:
        """What to send in place of a plan; None if it is another one."""
        if outline.key != self.key:
            return None
        return Again(self.plans, self.number, zlib.compress(outline.digests))


class Plans:
    """What the coordinator keeps of one save's planning: all local plans, and the metadata.

    Args:
        world: all ranks' plans.
    """

    def __init__(self, world: World) -> None:
        self.name = uuid.uuid4().hex
        self._sent = list(world.sent)
        self._shape = world.shape
        self._names: list[list[tuple[str, ...]]] = [  # of what is compared, of each shape
            [where for where, _ in common.data.digests()] for common in world.commons
        ]
        self._replicas = [
            [("replica", key, name) for key, own in zip(keys, reports, strict=True)
             for name in own.replicas]
            for keys, reports in (
                (world.commons[shape].data.reports, own.reports)
                for shape, own in zip(world.shape, world.own, strict=True)
            )
        ]  # fmt: skip
        self._pattern = self._pattern_of([each.digests for each in world.sent])
        self._metadata: Metadata | None = None

    def _pattern_of(self, of_ranks: Sequence[bytes]) -> tuple[list[int], ...]:
        """Which of the digests that are compared are equal.

        Ranks of one shape with the same digests are looked at once; but for digests of replicas,
        whose names are a rank's own.

        Args:
            of_ranks: digests of each rank, compressed.
        """
        opened: dict[bytes, bytes] = {}
        kinds: dict[tuple[int, bytes], int] = {}
        values: dict[tuple[tuple[str, ...], bytes], int] = {}
        of_rank: list[int] = []
        alike: list[int] = []
        replicas: list[int] = []
        for shape, own, sent in zip(self._shape, self._replicas, of_ranks, strict=True):
            digests = opened.get(sent)
            if digests is None:
                digests = opened[sent] = zlib.decompress(sent)
            names = self._names[shape]
            end = DIGEST * len(names)
            new = len(kinds)
            of_rank.append(kinds.setdefault((shape, digests[:end]), new))
            if of_rank[-1] == new:
                pairs = zip(names, _parts(digests[:end]), strict=True)
                alike += [values.setdefault(pair, len(values)) for pair in pairs]
            if own:
                pairs = zip(own, _parts(digests[end:]), strict=True)
                replicas += [values.setdefault(pair, len(values)) for pair in pairs]
        return of_rank, alike, replicas

    def keep(self, metadata: Metadata) -> None:
        """The metadata that was planned, before a storage writer has filled it."""
        self._metadata = dataclasses.replace(metadata)

    def recall(self, plans: Sequence[SavePlan]) -> Metadata | None:
        """The metadata, if all ranks' ``plans`` are as before."""
        sent = [Again.read(plan.planner_data) for plan in plans]
        if self._metadata is None or len(sent) != len(self._sent):
            return None
        found = [
            each.digests
            for number, each in enumerate(sent)
            if each is not None and each.number == number and each.plans == self.name
        ]
        if len(found) != len(sent) or self._pattern_of(found) != self._pattern:
            return None
        return dataclasses.replace(self._metadata)

    def whole(self, again: Again) -> Sent:
        """What ``again`` stands for."""
        if again.plans != self.name:
            raise unknown()
        return dataclasses.replace(self._sent[again.number], digests=again.digests)


def _parts(digests: bytes) -> list[bytes]:
    return [digests[at : at + DIGEST] for at in range(0, len(digests), DIGEST)]


def unknown() -> LayoutError:
    return LayoutError(
        "expected all ranks to use their planners for the same saves, found that a rank's was used "
        "in a save that the coordinator's was not: save again, which plans anew, and make a "
        "planner for each set of ranks that saves"
    )
