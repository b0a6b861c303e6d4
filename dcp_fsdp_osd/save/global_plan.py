"""The global plan of a save, on the coordinator: as before, for regular worlds, or item by item."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from dcp_fsdp_osd.checkpoint import INFO_KEY, SavedInfo
from dcp_fsdp_osd.compact import Lazy, compact
from dcp_fsdp_osd.errors import LayoutError
from dcp_fsdp_osd.save.agree import check_others, share_out
from dcp_fsdp_osd.save.consensus import agree
from dcp_fsdp_osd.save.regular import DefaultPlan, plan_regular
from dcp_fsdp_osd.save.repeat import Again, AsBefore, Numbered, Plans, unknown
from dcp_fsdp_osd.save.report import Report, Share
from dcp_fsdp_osd.save.wire import AnswerPlan, LocalData, Outline, Sent
from dcp_fsdp_osd.save.world import World

__all__ = ["plan_globally"]


def plan_globally(
    all_plans: list[SavePlan], known: Plans | None, default: DefaultPlan, *, to_lowest: bool
) -> tuple[list[SavePlan], Metadata, Plans]:
    """Answers to all ranks, the metadata, and what to keep for the next save.

    Args:
        known: of the last save.
        default: DCP's global plan.
        to_lowest: of what several ranks have the lowest writes all.

    Raises:
        LayoutError: ranks do not fit together.
    """
    data = [plan.planner_data for plan in all_plans]
    if not all(isinstance(each, Sent | LocalData) or Again.read(each) for each in data):
        raise LayoutError("expected FlatOptimSavePlanner on every rank, found another planner")
    recalled = None if known is None else known.recall(all_plans)
    if known is not None and recalled is not None:
        as_before = AsBefore(known.name).sent()
        answers = [SavePlan(plan.items, plan.storage_data, as_before) for plan in all_plans]
        return answers, recalled, known
    world = World([_sent(plan, known) for plan in all_plans])
    new = Plans(world)
    samples = world.samples()
    check_others([each.others for each in samples], [each.of_models for each in samples])
    regular = None
    if len(all_plans) > 1 and all(own.proposed for own in world.own):
        regular = plan_regular(world, default, to_lowest=to_lowest)
    if regular is None:
        answers, metadata = _item_by_item(world, all_plans, new.name, default, to_lowest=to_lowest)
    else:
        metadata = _with_infos(regular.metadata, regular.infos)
        answers = [
            AnswerPlan(
                world.lazy_items(number, kept),
                plan.storage_data,
                Numbered(new.name, number, share, kept),
            )
            for number, (plan, kept, share) in enumerate(
                zip(all_plans, regular.kept, regular.shares, strict=True)
            )
        ]
    new.keep(metadata)
    return answers, metadata, new


def _item_by_item(
    world: World, sent: Sequence[SavePlan], name: str, default: DefaultPlan, *, to_lowest: bool
) -> tuple[list[SavePlan], Metadata]:
    whole = [world.plan(rank, plan) for rank, plan in enumerate(sent)]
    data: list[LocalData] = [plan.planner_data for plan in whole]
    plans = [
        dataclasses.replace(plan, planner_data=d.mappings)
        for plan, d in zip(whole, data, strict=True)
    ]
    shares = [Share() for _ in plans]
    infos: dict[str, SavedInfo] = {}
    for key in dict.fromkeys(key for d in data for key in d.reports):
        info = agree(key, [d.reports.get(key, Report()) for d in data], plans, shares)
        if info is not None:
            infos[key] = info
    planned, metadata = default(share_out(plans, to_lowest=to_lowest))
    answers = [
        compact(dataclasses.replace(plan, planner_data=Numbered(name, number, share)))
        for number, (plan, share) in enumerate(zip(planned, shares, strict=True))
    ]
    return answers, _with_infos(metadata, infos)


def _sent(plan: SavePlan, known: Plans | None) -> Sent:
    """The local plan of a rank, as it travelled, or would have."""
    data = plan.planner_data
    again = Again.read(data)
    if again is not None:
        if known is None:
            raise unknown()
        return known.whole(again)
    if isinstance(data, LocalData):  # nothing travels in a world of one
        return Outline.of(plan).sent()
    if isinstance(plan.items, Lazy):
        found: Sent = data
        return found
    common = data.read_common()  # somebody has changed the items
    own = data.data(common, data.read_own(common))
    return Outline.of(dataclasses.replace(plan, planner_data=own)).sent()


def _with_infos(metadata: Metadata, infos: Mapping[str, SavedInfo]) -> Metadata:
    if not infos:
        return metadata
    planner_data = {**metadata.planner_data, INFO_KEY: SavedInfo.pack(infos)}
    return dataclasses.replace(metadata, planner_data=planner_data)
