"""Local plans of a load on their way to the coordinator, and its answers; what repeats, once.

Reads travel as columns of numbers, and names once. What ranks with the same parameters report
alike is made of the same bytes on all of them, which the coordinator reads once; the reads
themselves it looks at only where ranks are to read for one another. An answer has no items: a rank
knows what it has asked for. What others have made of the items of a plan is sent as it is.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from dcp_fsdp_osd.compact import (
    Lazy,
    dump_strings,
    joined,
    load_strings,
    no_collections,
    packed,
    parted,
    unpacked,
)
from dcp_fsdp_osd.errors import CheckpointMismatchError
from dcp_fsdp_osd.exchange.reads import SentItems, in_order
from dcp_fsdp_osd.load.agree import RankReport

__all__ = ["AnswerLoadPlan", "SentLoadPlan", "read_reports"]


@dataclass(frozen=True)
class _Sent:
    """A report as it travels; ``common`` is equal on ranks with the same parameters.

    Attributes:
        proposed: the items are those of the planner.
    """

    common: bytes
    own: bytes
    proposed: bool


class SentLoadPlan(LoadPlan):
    """A local plan with a :class:`RankReport`, that is pickled small.

    Unpickled, its ``planner_data`` is for :func:`read_reports`, and its items are made when they
    are asked for; in the order of :func:`~dcp_fsdp_osd.exchange.reads.in_order`, if they are those
    of the planner.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        report = self.planner_data
        if not isinstance(report, RankReport):
            return LoadPlan, (list(self.items), self.storage_data, report)
        proposed = len(self.items) == len(report.proposed) and all(
            map(operator.is_, self.items, report.proposed)
        )
        common = _dumped((report.loads, report.strict))
        own = packed((report.reads, report.checkpoint))
        data = _Sent(common, own, proposed)
        columns = SentItems.pack(in_order(self.items) if proposed else self.items)
        return _received, (columns, len(self.items), self.storage_data, data)


def _received(columns: bytes, count: int, storage_data: Any, data: _Sent) -> SentLoadPlan:
    items: Any = SentItems(columns, count, data.proposed)
    return SentLoadPlan(items, storage_data, data)


def _dumped(value: Any) -> bytes:
    return joined(*dump_strings(value))


def _loaded(data: bytes) -> Any:
    found, strings = parted(data)
    with no_collections():
        return load_strings(found, strings.decode())


def read_reports(plans: Sequence[LoadPlan]) -> list[RankReport]:
    """Of all ranks, as they were; those with equal parts have one of each.

    Raises:
        CheckpointMismatchError: a plan is not of our planner.
    """
    known: dict[bytes, tuple[Any, bool]] = {}
    reports = []
    for plan in plans:
        sent = plan.planner_data
        if isinstance(sent, _Sent):
            if sent.common not in known:
                known[sent.common] = _loaded(sent.common)
            reads, checkpoint = unpacked(sent.own)
            sent = RankReport(*known[sent.common], reads, checkpoint)
        if not isinstance(sent, RankReport):
            raise CheckpointMismatchError(
                "expected FlatOptimLoadPlanner on every rank, found another planner"
            )
        reports.append(sent)
    return reports


class AnswerLoadPlan(LoadPlan):
    """A rank's plan as it goes back: without the items, if they are what it had proposed."""

    @classmethod
    def of(cls, plan: LoadPlan, planner_data: Any) -> LoadPlan:
        sent = plan.planner_data
        proposed = isinstance(sent, _Sent) and sent.proposed and isinstance(plan.items, Lazy)
        plan = replace(plan, planner_data=planner_data)
        items: Any = plan.items if proposed else list(plan.items)
        return cls(items, plan.storage_data, planner_data)

    def __reduce__(self) -> tuple[Any, ...]:
        items = None if isinstance(self.items, Lazy) else list(self.items)
        return _answered, (packed((items, self.storage_data, self.planner_data)),)


def _answered(data: bytes) -> LoadPlan:
    with no_collections():
        items, storage_data, planner_data = unpacked(data)
    found: Any = Lazy(_not_yet) if items is None else items
    return AnswerLoadPlan(found, storage_data, planner_data)


def _not_yet() -> list[ReadItem]:
    raise CheckpointMismatchError(
        "expected FlatOptimLoadPlanner.finish_plan to be called before the items of its plan are "
        "looked at, which it puts in: call super().finish_plan(plan) first"
    )
