"""Param groups by FQN, merged over all ranks of a save.  Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dcp_fsdp_osd.errors import LayoutError, listed, several
from dcp_fsdp_osd.save.entries import GroupInfo

__all__ = ["MergedGroup", "merge_groups"]


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
