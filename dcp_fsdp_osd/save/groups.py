"""Param groups by FQN, merged over all ranks of a save.  Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from dcp_fsdp_osd.containers import Containers
from dcp_fsdp_osd.errors import LayoutError, listed, several
from dcp_fsdp_osd.save.agree import agree_on_containers
from dcp_fsdp_osd.save.per_rank import move
from dcp_fsdp_osd.save.report import GroupInfo, Report, Share
from dcp_fsdp_osd.tree import Path, dotted

__all__ = ["AgreedGroups", "agree_on_groups", "merge_groups"]


@dataclass
class MergedGroup:
    """One param group of a checkpoint: rank ``rank`` writes its group ``number`` with ``fqns``.

    Attributes:
        members: the groups, by rank and number, that were merged.
        varying: options that are not the same in all of them, and are kept per rank.
    """

    rank: int
    number: int
    fqns: list[str]
    options: Mapping[str, str]
    members: dict[tuple[int, int], Mapping[str, str]] = field(default_factory=dict)
    varying: set[str] = field(default_factory=set)


def merge_groups(
    ranks: Sequence[Sequence[GroupInfo]], key: str, signatures: Sequence[str] = ()
) -> list[MergedGroup]:
    """One list of param groups from those of all ranks.

    The first rank's groups stand, in its order.  A further rank's group joins the one that
    shares an FQN with it, else one with equal options (the same number first), else is appended:
    ranks may order their groups differently or own different FQNs (pipeline stages).

    Args:
        signatures: of each rank's layout. An option may differ between ranks of different ones, if
            each group that has it is in one merged group.

    Raises:
        LayoutError: ranks give one FQN different options; lists FQN, option and ranks.
    """
    merged: list[MergedGroup] = []
    alike: dict[frozenset[tuple[str, str]], list[int]] = {}
    place: dict[str, int] = {}
    conflicts: list[str] = []
    for rank, groups in enumerate(ranks):
        for number, group in enumerate(groups):
            homes = sorted({place[fqn] for fqn in group.fqns if fqn in place})
            for home in homes:
                conflicts += _differing(merged[home], group, rank, signatures, len(homes) == 1)
            options = frozenset(group.options.items())
            if not homes and rank > 0:
                equal = alike.get(options, [])
                homes = [number] if number in equal else equal[:1]
            if not homes:
                homes = [len(merged)]
                alike.setdefault(options, []).append(len(merged))
                merged.append(MergedGroup(rank, number, [], group.options))
            for home in homes:
                merged[home].members[rank, number] = group.options
            for fqn in group.fqns:
                if fqn not in place:
                    place[fqn] = homes[0]
                    merged[homes[0]].fqns.append(fqn)
    if conflicts:
        raise LayoutError(
            f"{key}: expected the same param group options on every rank, found:\n  "
            + listed(dict.fromkeys(conflicts))
        )
    return merged


def _differing(
    home: MergedGroup, group: GroupInfo, rank: int, signatures: Sequence[str], alone: bool
) -> list[str]:
    """Lines of options that differ and cannot be kept per rank; others become ``varying``."""
    lines: dict[str, str] = {}
    there = set(home.fqns)
    shared = [fqn for fqn in group.fqns if fqn in there]
    for (other, _), theirs in home.members.items():
        own = alone and signatures and signatures[rank] != signatures[other]
        for name in sorted(theirs.keys() | group.options.keys()):
            if theirs.get(name) == group.options.get(name):
                continue
            if own and name in theirs and name in group.options:
                home.varying.add(name)
            else:
                text = f"option {name!r} differs between ranks {other} and {rank}"
                lines.setdefault(name, f"{several(shared, 3)}: {text}")
    return list(lines.values())


@dataclass(frozen=True)
class AgreedGroups:
    """The param groups of all ranks.

    Attributes:
        fqns: of each group.
        containers: the mappings of all ranks, of groups under the merged numbers.
        owners: keys of options that are kept per rank -> whose they are.
        varying: these options, as they are without a rank's signature.
    """

    fqns: list[list[str]]
    containers: Containers
    owners: dict[str, str]
    varying: list[str]


def agree_on_groups(
    key: str, reports: Sequence[Report], plans: list[SavePlan], shares: Sequence[Share]
) -> AgreedGroups:
    """Let each merged param group be written whole, by one rank, under its merged number.

    Changes ``plans`` and ``shares``.
    """
    merged = merge_groups([r.groups for r in reports], key, [r.signature for r in reports])
    owners: dict[str, str] = {}
    varying: dict[str, None] = {}
    for rank, (report, share) in enumerate(zip(reports, shares, strict=True)):
        whose = f"rank {rank} of {len(reports)}"
        plans[rank], own = _renumbered(f"{key}.param_groups.", rank, plans[rank], merged, report)
        for each in own:
            share.renamed[each.new] = each.old
            if each.fqns is not None:
                share.values[each.new] = each.fqns
            if each.varying:
                owners[each.new] = whose
                varying[each.varying] = None
    shared = []
    number_of = {(group.rank, group.number): i for i, group in enumerate(merged)}
    for rank, report in enumerate(reports):
        kept = Containers()
        for path, each_of in report.containers.items():
            if path[:1] != ("param_groups",):
                kept[path] = each_of
            elif (rank, path[1]) in number_of:
                number = number_of[rank, path[1]]  # type: ignore[index]
                moved: Path = (*path[:1], number, *path[2:])
                kept[moved] = each_of
        shared.append(kept)
    containers = agree_on_containers(key, shared)
    fqns = [group.fqns for group in merged]
    return AgreedGroups(fqns, containers, owners, list(varying))


@dataclass(frozen=True)
class _Option:
    """An entry of a param group: its key when written, and on the rank; its ``fqns`` if these
    are it; and, if it is kept per rank, what it is in words."""

    new: str
    old: str
    fqns: list[str] | None
    varying: str


def _renumbered(
    prefix: str, rank: int, plan: SavePlan, merged: Sequence[MergedGroup], report: Report
) -> tuple[SavePlan, list[_Option]]:
    """A rank's plan with the options that it writes, under merged numbers, and no other's."""
    place = {member: i for i, group in enumerate(merged) for member in group.members}
    items: list[WriteItem] = []
    options: list[_Option] = []
    old_mappings: dict[str, Path] = plan.planner_data
    mappings = {key: path for key, path in old_mappings.items() if not key.startswith(prefix)}
    for item in plan.items:
        name = item.index.fqn
        if not name.startswith(prefix):
            items.append(item)
            continue
        path = old_mappings[name]
        depth = path.index("param_groups") + 1
        number = place.get((rank, path[depth]))  # type: ignore[arg-type]
        if number is None:
            continue
        group, option = merged[number], path[depth + 1 :]
        varies = option[0] in group.varying
        if not varies and (group.rank, group.number) != (rank, path[depth]):
            continue
        new_path: Path = (*path[:depth], number, *option)
        if varies:
            new_path = move(new_path, report)
        new = dotted(new_path)
        mappings[new] = new_path
        fqns = group.fqns if option == ("params",) else None
        words = dotted(("param_groups", number, *option)) if varies else ""
        options.append(_Option(new, name, fqns, words))
        index = dataclasses.replace(item.index, fqn=new)
        items.append(dataclasses.replace(item, index=index))
    return dataclasses.replace(plan, items=items, planner_data=mappings), options
