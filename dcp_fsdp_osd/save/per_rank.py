"""State that differs between ranks, though it is not cut as its parameter is: kept per rank.

An RMS of the local piece, a scale per local block, a custom object: what one rank has of it is of
no use to another. Each rank's value is written beside the optimizer, under the signature of what
that rank holds, and loads where a rank holds the same.  Pure.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from dcp_fsdp_osd.checkpoint import per_rank_prefix
from dcp_fsdp_osd.errors import LayoutError, listed, several
from dcp_fsdp_osd.save.replicas import EQUAL
from dcp_fsdp_osd.save.report import Report
from dcp_fsdp_osd.tree import Path, dotted

__all__ = ["differing", "keep_per_rank", "move", "stateless_ranks"]


def keep_per_rank(
    key: str, reports: Sequence[Report], plans: list[SavePlan], options: Sequence[str]
) -> tuple[list[dict[str, str]], dict[str, str]]:
    """Have what is not the same on all ranks written by each of them. Changes ``plans``.

    Args:
        options: keys of param groups' options for which that is done already, to be told.

    Returns:
        For each rank: key to write -> key on the rank; and the keys to write -> whose they are.

    Raises:
        LayoutError: ranks that hold the same part have different values, or a state is cut like its
            flat parameter of several FQNs on some ranks alone.
    """
    renamed: list[dict[str, str]] = [{} for _ in reports]
    owners: dict[str, str] = {}
    _drop_of_empty(reports, plans)
    apart = differing(key, reports)
    for rank, (report, plan) in enumerate(zip(reports, plans, strict=True)):
        items: list[WriteItem] = []
        mappings: dict[str, Path] = dict(plan.planner_data)
        done: set[str] = set()
        for item in plan.items:
            name = item.index.fqn
            if name not in apart:
                items.append(item)
                continue
            path = mappings[name]
            fqn = str(path[report.depth + 1]) if len(path) > report.depth + 1 else ""
            if name in done or report.heads.get(fqn, fqn) != fqn:  # one for all of a flat parameter
                continue
            done.add(name)
            new = move(path, report)
            if name in report.pieces:
                item = _whole(item, plan.items)  # noqa: PLW2901
            items.append(
                dataclasses.replace(
                    item,
                    index=dataclasses.replace(item.index, fqn=dotted(new), offset=_start(item)),
                )
            )
            mappings[dotted(new)] = new
            renamed[rank][dotted(new)] = name
            owners[dotted(new)] = f"rank {rank} of {len(reports)}"
        for name in apart:
            mappings.pop(name, None)
            report.pieces.pop(name, None)
        plans[rank] = dataclasses.replace(plan, items=items, planner_data=mappings)
    told = [*options, *sorted(apart)]
    if told:
        warnings.warn(
            f"{key}: not the same on every rank, so kept for each, to be loaded at the same layout "
            f"only: {several(told)}",
            stacklevel=2,
        )
    return renamed, owners


def move(path: Path, report: Report) -> Path:
    """Where a rank keeps what it would else write under ``path``."""
    n = report.depth
    if path[n] == "state":
        return (*per_rank_prefix(path[:n]), path[n + 1], report.signature, *path[n + 2 :])
    return (*per_rank_prefix(path[:n]), "", report.signature, *path[n:])


def stateless_ranks(
    key: str, reports: Sequence[Report], plans: Sequence[SavePlan]
) -> dict[str, list[str]]:
    """FQN -> signatures of the ranks that have elements of it and no state, where others have."""
    wanted = {fqn for report in reports for fqn in report.stateless}
    if not wanted:
        return {}
    beside = dotted(per_rank_prefix((key,)))
    stateful: set[Any] = set()
    for report, plan in zip(reports, plans, strict=True):
        n = report.depth
        heads = {path[:n]: dotted(path[:n]) for path in plan.planner_data.values()}
        for path in plan.planner_data.values():
            if heads[path[:n]] == beside:
                stateful.update(path[n : n + 1])
            elif heads[path[:n]] == key and path[n : n + 1] == ("state",):
                stateful.update(path[n + 1 : n + 2])
    found: dict[str, list[str]] = {}
    for fqn in sorted(wanted & stateful):
        without = {report.signature for report in reports if fqn in report.stateless}
        # A replica of a rank that has state is given it: both hold the same.
        without -= {report.signature for report in reports if fqn not in report.stateless}
        if without:
            found[fqn] = sorted(without)
    return found


def _start(item: WriteItem) -> torch.Size | None:
    return (
        item.index.offset
        if item.tensor_data is None
        else torch.Size(item.tensor_data.chunk.offsets)
    )


def differing(key: str, reports: Sequence[Report]) -> set[str]:
    """Keys whose values are not alike on all ranks that have them.

    Raises:
        LayoutError: ranks that hold the same part have different values.
    """
    found: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, report in enumerate(reports):
        for name, value in report.scalars.items():
            found[name][value].append(rank)
        for name in report.pieces:
            found[name]["like the parameter's local piece"].append(rank)
        for name in report.per_rank_of:
            found[name]["of another shape"].append(rank)
    apart: set[str] = set()
    refused: list[str] = []
    for name, kinds in sorted(found.items()):
        if len(kinds) == 1:
            continue
        holders = {kind: {reports[r].signature for r in ranks} for kind, ranks in kinds.items()}
        shared = sum(map(len, holders.values())) > len(set().union(*holders.values()))
        several = any(name in r.pieces and r.pieces[name] in r.heads for r in reports)
        if shared or several:
            refused.append(f"{name}: ranks " + " / ".join(map(str, kinds.values())))
        else:
            apart.add(name)
    if refused:
        raise LayoutError(
            f"{key}: expected state that is not cut as its parameter is to be the same on every "
            f"rank that holds the same part of the model, found {len(refused)} that differ:\n  "
            + listed(refused)
            + f"\n{EQUAL}"
        )
    return apart


def _drop_of_empty(reports: Sequence[Report], plans: list[SavePlan]) -> None:
    """Drop what ranks without elements of a parameter have, where it is no more than others have.

    Other state of theirs (LBFGS keeps that of all parameters with the first) stays.
    """
    shared = {name for r in reports for name in (*r.pieces, *r.scalars)} - {
        name for r in reports for name in r.per_rank_of
    }
    for rank, (report, plan) in enumerate(zip(reports, plans, strict=True)):
        drop = {
            own
            for of_param in report.empties
            if shared.issuperset(of_param.values())
            for own in of_param
        }
        if drop:
            items = [item for item in plan.items if item.index.fqn not in drop]
            mappings = {k: v for k, v in plan.planner_data.items() if k not in drop}
            plans[rank] = dataclasses.replace(plan, items=items, planner_data=mappings)
            for name in drop:
                report.info.opaque.pop(name, None)


def _whole(item: WriteItem, items: Sequence[WriteItem]) -> WriteItem:
    """The item of a local flat piece as a tensor of its own."""
    boxes = [i.tensor_data for i in items if i.index.fqn == item.index.fqn and i.tensor_data]
    size = torch.Size([sum(math.prod(data.chunk.sizes) for data in boxes)])
    data = TensorWriteData(ChunkStorageMetadata(torch.Size([0]), size), boxes[0].properties, size)
    index = MetadataIndex(item.index.fqn, torch.Size([0]))
    return dataclasses.replace(item, index=index, type=WriteItemType.TENSOR, tensor_data=data)
