"""Param groups by FQN: merged over ranks for a save, matched to the optimizer's for a load.

Pure.  Groups are never matched by number: a saved group is the set of its FQNs.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .errors import CheckpointMismatchError, LayoutError, listed
from .layout import FlatLayout
from .optim_state import GroupInfo
from .tree import digest

__all__ = ["MergedGroup", "SavedGroups", "match_groups", "merge_groups"]


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
                lines.setdefault(name, f"{_some(shared)}: {text}")
    return list(lines.values())


@dataclass
class SavedGroups:
    """Param groups as read from a checkpoint.

    Attributes:
        options: group -> option -> value. A group is a number, or an FQN where the checkpoint
            was saved with ``flatten_optimizer_state_dict=True``.
        members: group -> its FQNs, as the checkpoint names them.
    """

    options: dict[int | str, dict[str, Any]] = field(default_factory=dict)
    members: dict[int | str, list[str]] = field(default_factory=dict)


def match_groups(
    saved: SavedGroups, layout: FlatLayout, current: Sequence[Mapping[str, Any]], key: str
) -> list[dict[str, Any]]:
    """The current optimizer's param groups with the options that were saved for their FQNs.

    Rule: a current group takes the options of the saved groups that its FQNs were in, which must
    agree; FQNs that were in no saved group have no say; options that were not saved keep their
    current value. The k-th current group without parameters takes the options of the k-th saved
    group without parameters. A group of which nothing was saved keeps its options.

    Args:
        saved: the checkpoint's groups.
        layout: of the current optimizer; its ``groups`` number the parameters of each group.
        current: the current groups; not changed.

    Raises:
        CheckpointMismatchError: groups with different options were merged; lists them all.
    """
    home: dict[str, int | str] = {}
    for group, members in saved.members.items():
        for name in members:
            home[layout.resolve(name) or name] = group
    empty = [group for group, members in saved.members.items() if not members]
    conflicts: list[str] = []
    result = []
    for number, (ids, now) in enumerate(zip(layout.groups, current, strict=True)):
        fqns = [fqn for i in ids for fqn in layout.params[i].fqns]
        sources = dict.fromkeys(home[fqn] for fqn in fqns if fqn in home)
        if not fqns and empty:
            sources = {empty.pop(0): None}
        taken: dict[str, Any] = {}
        for source in sources:
            theirs = saved.options.get(source, {})
            first = next(iter(sources))
            if source != first:
                conflicts += _clash(number, first, source, saved)
            taken.update({k: v for k, v in theirs.items() if k not in taken})
        for name, value in taken.items():
            if isinstance(value, torch.Tensor) and isinstance(now.get(name), torch.Tensor):
                taken[name] = value.to(now[name].device)
        options = {**{k: v for k, v in now.items() if k != "params"}, **taken}
        result.append(copy.deepcopy(options))  # nothing is shared with another group, or is live
    if conflicts:
        raise CheckpointMismatchError(
            f"{key}: expected one value for each option of a param group, found that groups with "
            f"different options were merged into one:\n  "
            + listed(conflicts)
            + "\nKeep these parameters in groups of their own, or save with equal options"
        )
    return result


def _clash(number: int, first: int | str, other: int | str, saved: SavedGroups) -> list[str]:
    a, b = saved.options.get(first, {}), saved.options.get(other, {})
    lines = []
    for name in sorted(a.keys() | b.keys()):
        if name in a and name in b and digest(a[name]) == digest(b[name]):
            continue
        left = repr(a[name]) if name in a else "no value"
        right = repr(b[name]) if name in b else "no value"
        lines.append(
            f"group {number}, option {name!r}: {left} for {_some(saved.members.get(first, []))}, "
            f"{right} for {_some(saved.members.get(other, []))}"
        )
    return lines


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
