"""Repeated saves plan once: a rank whose plan is as before sends digests of its values alone.

What a plan is made of is its outline (names, boxes, layouts) and digests of values that ranks hold
alike.  A rank keeps the hash of its outline, and what it was told to write, from save to save.  The
coordinator keeps the ranks' plans and the metadata.  As long as no outline has changed, and the
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
import hashlib
import pickle
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from dcp_fsdp_osd.errors import LayoutError
from dcp_fsdp_osd.save.report import GroupInfo, Report, Share
from dcp_fsdp_osd.tree import Path

__all__ = ["Again", "AsBefore", "Kept", "LocalData", "Numbered", "Outline", "Plans", "unknown"]

_DIGEST = 8  # bytes of one


@dataclass
class LocalData:
    """``planner_data`` of a local plan.

    Attributes:
        mappings: DCP's: key -> path in the state dict.
        reports: of optimizers and models, by key.
        others: key of what is no optimizer's and no model's -> digest.
        of_models: likewise, of models.
    """

    mappings: dict[str, Path]
    reports: dict[str, Report]
    others: dict[str, str]
    of_models: dict[str, str]

    def digests(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """What is compared between ranks, by what it is compared with; always in this order."""
        for name, value in self.others.items():
            yield ("other", name), value
        for name, value in self.of_models.items():
            yield ("of model", name), value
        for key, report in self.reports.items():
            for name, value in report.scalars.items():
                yield ("scalar", key, name), value
            for name, value in report.replicas.items():
                yield ("replica", key, name), value
            for group in report.groups:
                for name, value in group.options.items():
                    yield ("option", key, name), value

    def with_digests(self, digests: Iterator[str]) -> LocalData:
        """A copy, down to what planning changes, with other digests, in the order of
        :meth:`digests`."""

        def replaced(values: Any) -> dict[str, str]:
            return {name: next(digests) for name in values}

        others, of_models = replaced(self.others), replaced(self.of_models)
        reports = {
            key: dataclasses.replace(
                report,
                scalars=replaced(report.scalars),
                replicas=replaced(report.replicas),
                groups=[GroupInfo(g.fqns, replaced(g.options)) for g in report.groups],
                pieces=dict(report.pieces),
                info=dataclasses.replace(report.info, opaque=dict(report.info.opaque)),
            )
            for key, report in self.reports.items()
        }
        return LocalData(dict(self.mappings), reports, others, of_models)


@dataclass(frozen=True)
class Outline:
    """A local plan: the hash of all of it but for digests, and these, one after the other."""

    key: bytes
    digests: bytes

    @classmethod
    def of(cls, plan: SavePlan) -> Outline:
        data: LocalData = plan.planner_data
        values = [value for _, value in data.digests()]
        blank = data.with_digests(iter([""] * len(values)))
        text = pickle.dumps((plan.items, vars(blank)), protocol=5)
        return cls(hashlib.blake2b(text).digest(), bytes.fromhex("".join(values)))


@dataclass(frozen=True)
class Again:
    """Sent in place of :class:`LocalData`: the plan is that of number ``number`` of ``plans``."""

    plans: str
    number: int
    digests: bytes


@dataclass(frozen=True)
class Numbered:
    """Answered to a whole plan: the rank's share, and what to call its plan from now on."""

    plans: str
    number: int
    share: Share


@dataclass(frozen=True)
class AsBefore:
    """Answered to :class:`Again`."""

    plans: str


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
        return Again(self.plans, self.number, outline.digests)


class Plans:
    """What the coordinator keeps of one save's planning: all local plans, and the metadata.

    Args:
        plans: all ranks', each with :class:`LocalData`; copied before planning changes them.
    """

    def __init__(self, plans: Sequence[SavePlan]) -> None:
        self.name = uuid.uuid4().hex
        self._plans: list[SavePlan] = []
        numbers: dict[tuple[str, ...], int] = {}
        self._compared: list[int] = []  # for each digest of all ranks, what it is compared with
        values: list[str] = []
        for plan in plans:
            data: LocalData = plan.planner_data
            pairs = list(data.digests())
            self._compared += [numbers.setdefault(where, len(numbers)) for where, _ in pairs]
            own = [value for _, value in pairs]
            values += own
            copied = data.with_digests(iter(own))
            self._plans.append(dataclasses.replace(plan, planner_data=copied, storage_data=None))
        self._pattern = self._pattern_of(bytes.fromhex("".join(values)))
        self._metadata: Metadata | None = None

    def _pattern_of(self, digests: bytes) -> list[int]:
        """For each digest, the first that is compared with it and equal."""
        first: dict[tuple[int, bytes], int] = {}
        return [
            first.setdefault((where, digests[at * _DIGEST : (at + 1) * _DIGEST]), at)
            for at, where in enumerate(self._compared)
        ]

    def keep(self, metadata: Metadata) -> None:
        """The metadata that was planned, before a storage writer has filled it."""
        self._metadata = dataclasses.replace(metadata)

    def recall(self, plans: Sequence[SavePlan]) -> Metadata | None:
        """The metadata, if all ranks' ``plans`` are as before."""
        sent = [plan.planner_data for plan in plans]
        if self._metadata is None or [
            each.number if isinstance(each, Again) and each.plans == self.name else None
            for each in sent
        ] != list(range(len(self._plans))):
            return None
        if self._pattern_of(b"".join(each.digests for each in sent)) != self._pattern:
            return None
        return dataclasses.replace(self._metadata)

    def whole(self, plan: SavePlan) -> SavePlan:
        """What ``plan``, of :class:`Again`, stands for."""
        again: Again = plan.planner_data
        if again.plans != self.name:
            raise unknown()
        kept = self._plans[again.number]
        data: LocalData = kept.planner_data
        text = again.digests.hex()
        digests = (text[at : at + 2 * _DIGEST] for at in range(0, len(text), 2 * _DIGEST))
        return dataclasses.replace(
            plan, items=kept.items, planner_data=data.with_digests(digests), usable=kept.usable
        )


def unknown() -> LayoutError:
    return LayoutError(
        "expected all ranks to use their planners for the same saves, found that a rank's was used "
        "in a save that the coordinator's was not: save again, which plans anew, and make a "
        "planner for each set of ranks that saves"
    )
