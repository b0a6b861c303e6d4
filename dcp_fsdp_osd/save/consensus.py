"""All ranks' reports of one optimizer or model: what each writes, and what is recorded.  Pure.

The order matters: groups are renumbered, then quantized and per-rank state is given keys of its
own, then what is left are tensors that are cut alike, in which overlaps and holes are looked for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch.distributed.checkpoint.planner import SavePlan

from dcp_fsdp_osd.checkpoint import SavedInfo
from dcp_fsdp_osd.lowbit.save import agree_on_quantized
from dcp_fsdp_osd.save.agree import drop_overlaps, fill_holes
from dcp_fsdp_osd.save.groups import agree_on_groups
from dcp_fsdp_osd.save.per_rank import keep_per_rank, stateless_ranks
from dcp_fsdp_osd.save.replicas import warn_of_replicas
from dcp_fsdp_osd.save.report import Report, Share

__all__ = ["agree"]


def agree(
    key: str,
    reports: Sequence[Report],
    plans: list[SavePlan],
    shares: Sequence[Share],
    *,
    tiled: bool = False,
) -> SavedInfo | None:
    """What is recorded; None if nothing is. Changes ``plans`` and ``shares``.

    Args:
        reports, plans, shares: by rank.
        tiled: boxes are known to hold each element once, and are not among ``plans``.

    Raises:
        LayoutError: ranks do not fit together.
    """
    groups = agree_on_groups(key, reports, plans, shares)
    warn_of_replicas(key, [report.replicas for report in reports])
    quantized, unquantized = agree_on_quantized(key, [r.quantized for r in reports], plans)
    kept, owners = keep_per_rank(key, reports, plans, groups.varying)
    for share, *renamed in zip(shares, unquantized, kept, strict=True):
        for names in renamed:
            share.renamed.update(names)
    absent: dict[str, list[Any]] = {}
    if not tiled:
        drop_overlaps(reports, plans)
        absent, zeros = fill_holes(key, reports, plans)
        shares[0].zeros |= zeros
    containers = [each.pack(path) for path, each in groups.containers.items()]
    if any(report.model for report in reports):
        return SavedInfo(containers=containers) if containers else None
    info = SavedInfo.joined(report.info for report in reports)
    return dataclasses.replace(
        info,
        groups=groups.fqns,
        absent=absent,
        opaque={**info.opaque, **owners, **groups.owners},
        int_keys=[
            list(map(str, path[1:]))
            for path, each in groups.containers.items()
            if path[:1] == ("state",) and all(type(key) is int for key in each.keys)
        ],
        containers=containers,
        layouts=sorted({report.signature for report in reports}),
        stateless=stateless_ranks(key, reports, plans),
        quantized=[vars(how) for how in quantized],
    )
