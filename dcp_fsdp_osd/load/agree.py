"""What all ranks of a load agree on: that all of it matches, or what is skipped.  Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from dcp_fsdp_osd.errors import CheckpointMismatchError, Mismatch, listed
from dcp_fsdp_osd.exchange.decide import RankReads, SharedReads, about_reader
from dcp_fsdp_osd.load.protocol import LoadReport
from dcp_fsdp_osd.storage.identity import Identity, check_one_checkpoint

__all__ = ["Agreed", "RankReport", "agree", "check_checkpoint"]


@dataclass(frozen=True)
class RankReport:
    """``planner_data`` of a local plan: what one rank has to say of it.

    Attributes:
        loads: by key of the optimizer or model.
        reads: what others could read for it, or it for others.
        checkpoint: that it has opened.
        proposed: the reads, as the planner has them; does not travel.
    """

    loads: Mapping[str, LoadReport]
    strict: bool
    reads: RankReads
    checkpoint: Identity
    proposed: Sequence[ReadItem] = ()


@dataclass(frozen=True)
class Agreed:
    """``planner_data`` of a rank's share of the global plan."""

    skipped: list[Mismatch]
    shared: SharedReads | None


def check_checkpoint(reports: Sequence[RankReport], plans: Sequence[LoadPlan]) -> None:
    """See that all ranks read one.

    Raises:
        CheckpointMismatchError: they do not.
    """
    opened = []
    for report, about in zip(reports, map(about_reader, plans), strict=True):
        place = about.get("url", report.checkpoint.place)
        opened.append(dataclasses.replace(report.checkpoint, place=place))
    check_one_checkpoint(opened, [report.reads.rank for report in reports])


def agree(reports: Sequence[RankReport]) -> list[Mismatch]:
    """All that is skipped, which is nothing if any rank is strict.

    Raises:
        CheckpointMismatchError: of every mismatch of every rank the first ten are listed, and of
            entries that no rank has a use for.
    """
    skipped: list[Mismatch] = []
    strict = any(report.strict for report in reports)
    for key in dict.fromkeys(key for report in reports for key in report.loads):
        unmatched, unused = _of_all_ranks([report.loads.get(key) for report in reports])
        if strict and (unmatched or unused):
            raise CheckpointMismatchError(
                f"{key}: the checkpoint is not of this model and optimizer:\n  "
                + "\n  ".join(filter(None, (listed(unmatched), listed(unused))))
                + "\nPass strict=False to load the rest and leave these as they are; "
                "planner.skipped then has a line for each"
            )
        skipped += unmatched + unused
    return skipped


def _of_all_ranks(reports: Sequence[LoadReport | None]) -> tuple[list[Mismatch], list[Mismatch]]:
    """What does not match on any rank, each with its ranks; and what no rank has a use for.

    Args:
        reports: by rank; None where a rank has no such optimizer.
    """
    ranks: dict[Mismatch, list[int]] = {}
    for rank, report in enumerate(reports):
        for mismatch in dict.fromkeys(report.mismatches if report is not None else ()):
            ranks.setdefault(mismatch, []).append(rank)
    unmatched = [
        dataclasses.replace(mismatch, ranks=tuple(met) if len(met) < len(reports) else ())
        for mismatch, met in ranks.items()
    ]
    present = [report for report in reports if report is not None]
    distinct = {id(report): report for report in present}.values()  # ranks share equal ones
    names = {name for report in distinct for name in report.names}
    extra = sorted({name for report in distinct for name in report.saved_names} - names)
    found = f"in the checkpoint, but the {present[0].unused}"
    return unmatched, [Mismatch(name, found=found) for name in extra]
