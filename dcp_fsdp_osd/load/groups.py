"""Param groups by FQN: those of a checkpoint, matched to the optimizer's.

Pure.  Groups are never matched by number: a saved group is the set of its FQNs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dcp_fsdp_osd.checkpoint import CheckpointIndex
from dcp_fsdp_osd.containers import remade
from dcp_fsdp_osd.errors import CheckpointMismatchError, listed, several
from dcp_fsdp_osd.layout.flat import FlatLayout
from dcp_fsdp_osd.tree import Path, digest, set_leaf

__all__ = ["SavedGroups", "match_groups", "put_value", "read_groups"]


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


def read_groups(
    index: CheckpointIndex, values: Mapping[str, Any], fqn: Callable[[str], str]
) -> SavedGroups:
    """The groups of a checkpoint.

    Args:
        values: key -> what was read of it.
        fqn: takes wrappers' names out of a name.
    """
    read: dict[int | str, dict[str, Any]] = {}
    if index.one_list is not None:
        read.update(enumerate(map(dict, values[index.one_list])))
    for group, by_path in index.groups.items():
        tree: dict[str, Any] = {}
        for path, key in by_path.items():
            put_value(tree, path, values[key])
        read[group] = remade(tree, index.containers.below(("param_groups", group)))
    saved = SavedGroups()
    for group, options in read.items():
        members = options.pop("params", None)
        options.pop("param_names", None)  # of the wrapping then; the current ones stay
        names = [group] if members is None else members
        saved.members[group] = [fqn(str(name)) for name in names]
        saved.options[group] = options
    return saved


def put_value(values: dict[Any, Any], path: Path, value: Any) -> None:
    """Put ``value`` at ``path``; torch before 2.4 saved what holds no tensor as one object."""
    if path:
        set_leaf(values, path, value)
    else:
        values.update(value)


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
        result.append(
            copy.deepcopy(options)
        )  # nothing is shared with another group, or is the optimizer's own
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
        these, those = (several(saved.members.get(each, []), 3) for each in (first, other))
        lines.append(f"group {number}, option {name!r}: {left} for {these}, {right} for {those}")
    return lines
