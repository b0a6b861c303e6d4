"""A state dict that was taken apart, kept for those that are made as it was.

Between two saves of a training run values change and nothing else, and all that is planned follows
from what does not change. So a planner keeps what it made of a state dict, without the values, and
where in the state dict each value was; of the next one, if it is made alike, it takes the values
from there. What is compared is in :mod:`~dcp_fsdp_osd.save.structure`; it is compared in each save.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem

from dcp_fsdp_osd.compat import object_bytes
from dcp_fsdp_osd.layout.flat import Piece
from dcp_fsdp_osd.save.replicas import Compared
from dcp_fsdp_osd.save.report import Report
from dcp_fsdp_osd.save.structure import structure_of
from dcp_fsdp_osd.save.wire import Outline
from dcp_fsdp_osd.stateful.guard import Guard
from dcp_fsdp_osd.stateful.model import ModelGuard
from dcp_fsdp_osd.stateful.optim import OptimGuard
from dcp_fsdp_osd.tree import Path

__all__ = ["Apart", "Template", "Values"]


@dataclass
class Apart:
    """What a planner makes of a state dict, but for its values.

    Attributes:
        mappings: DCP's: key -> path.
        boxes: what is written of flat tensors -> key of the tensor, and the box.
        reports: of optimizers and models, by key.
        compared: of optimizers, by key: what ranks compare of them.
        optims: of those: path in the state dict; and FQN -> key in ``state``.
        others, of_models: keys of what ranks compare of the rest, and of models.
    """

    mappings: dict[str, Path] = field(default_factory=dict)
    boxes: dict[MetadataIndex, tuple[str, Piece]] = field(default_factory=dict)
    reports: dict[str, Report] = field(default_factory=dict)
    compared: dict[str, Compared] = field(default_factory=dict)
    optims: dict[str, tuple[Path, Mapping[str, Any]]] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)
    of_models: list[str] = field(default_factory=list)


@dataclass
class Values:
    """What goes with an :class:`Apart`.

    Attributes:
        plain: key -> what DCP's default planner writes.
        flat: key -> local flat tensor.
        groups: of each optimizer, by key: its param groups.
    """

    plain: dict[str, Any] = field(default_factory=dict)
    flat: dict[str, torch.Tensor] = field(default_factory=dict)
    groups: dict[str, Sequence[Mapping[Any, Any]]] = field(default_factory=dict)

    def of(self, key: str) -> Any:
        """The value of a key."""
        return self.flat[key] if key in self.flat else self.plain[key]


_Places = list[tuple[tuple[Any, ...], list[tuple[str, Any]]]]
"""Paths of mappings or lists, with the actual keys; and of values in them: name, and key."""


@dataclass
class Template:
    """What a state dict was made into, and how it was made.

    Attributes:
        items, outline: of the rank's plan; without them its values alone are found again.
    """

    apart: Apart
    _facts: tuple[Any, ...]
    _structure: list[Any]
    _guards: list[Any]
    _plain: _Places
    _flat: _Places
    _constants: dict[str, Any]
    items: list[WriteItem] = field(default_factory=list)
    outline: Outline | None = None

    @classmethod
    def of(
        cls, state_dict: Mapping[str, Any], apart: Apart, values: Values, facts: tuple[Any, ...]
    ) -> Template | None:
        """None where it is not known what ``values`` follow from.

        Args:
            facts: whatever else counts.
        """
        found = structure_of(state_dict)
        if found is None or any(report.info.opaque for report in apart.reports.values()):
            return None
        structure, guards = found
        constants: dict[str, Any] = {}
        plain: dict[str, tuple[Any, ...]] = {}
        flat: dict[str, tuple[Any, ...]] = {}
        try:
            for name, value in values.plain.items():
                path = _origin(apart.mappings[name], apart, state_dict)
                if _at(state_dict, path) is value:
                    plain[name] = path
                elif path[-1] == "params" and _of_groups(path, apart):
                    constants[name] = value  # the FQNs of a group
                else:
                    return None
            for name, local in values.flat.items():
                flat[name] = _origin(apart.mappings[name], apart, state_dict)
                if not _same_memory(local, _at(state_dict, flat[name])):
                    return None
        except (LookupError, TypeError):
            return None
        keys = list(map(_fixed, guards))
        return cls(apart, facts, structure, keys, _places(plain), _places(flat), constants)

    def fill(self, state_dict: Mapping[str, Any], facts: tuple[Any, ...]) -> Values | None:
        """The values of ``state_dict``; None if it is not made as this was.

        Raises:
            LayoutError: a Stateful could not make its state dict.
        """
        found = structure_of(state_dict)
        if found is None or facts != self._facts or found[0] != self._structure:
            return None
        for guard in found[1]:
            guard.check()
        if list(map(_fixed, found[1])) != self._guards:
            return None
        return Values(
            {**dict(_filled(self._plain, state_dict)), **self._constants},
            {
                name: value.detach() if value.requires_grad else value
                for name, value in _filled(self._flat, state_dict)
            },
            {
                key: _at(state_dict, path)["param_groups"]
                for key, (path, _) in self.apart.optims.items()
            },
        )

    def learn(self, items: list[WriteItem], outline: Outline) -> None:
        """Take in the plan that was made."""
        if not any(object_bytes(item) for item in items):  # what a value's size would be in
            self.items, self.outline = items, outline


def _fixed(guard: Guard) -> tuple[Any, ...]:
    """What of a guard counts for a plan; to be compared."""
    if isinstance(guard, OptimGuard):
        return type(guard), guard.problem, guard.layout, repr(guard.optimizer)
    assert isinstance(guard, ModelGuard)
    return (
        type(guard),
        guard.problem,
        guard.segments,
        guard.shard_groups,
        guard.tied,
        guard.dtypes,
        guard.extra,
    )


def _of_groups(path: tuple[Any, ...], apart: Apart) -> bool:
    return any(
        path[:-2] == (*key, "param_groups") and type(path[-2]) is int
        for key, _ in apart.optims.values()
    )


def _origin(path: Path, apart: Apart, state_dict: Mapping[str, Any]) -> tuple[Any, ...]:
    """Where in the state dict is what is written under ``path``, with the keys that it has."""
    place: tuple[Any, ...] = path
    for key, stateful in apart.optims.values():
        depth = len(key) + 1
        if path[:depth] == (*key, "state") and path[depth] in stateful:
            place = (*path[:depth], stateful[str(path[depth])], *path[depth + 1 :])
    here: Any = state_dict
    found = []
    for step in place:
        if isinstance(here, Mapping) and step not in here:
            (step,) = [key for key in here if str(key) == step]  # noqa: PLW2901
        found.append(step)
        here = here[step]
    return tuple(found)


def _at(root: Any, path: Sequence[Any]) -> Any:
    for step in path:
        root = root[step]
    return root


def _same_memory(local: torch.Tensor, value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.data_ptr() == local.data_ptr()
        and (value.dtype, value.shape, value.stride(), value.device)
        == (local.dtype, local.shape, local.stride(), local.device)
    )


def _places(paths: Mapping[str, tuple[Any, ...]]) -> _Places:
    by_parent = itertools.groupby(paths.items(), key=lambda item: item[1][:-1])
    return [(parent, [(name, path[-1]) for name, path in those]) for parent, those in by_parent]


def _filled(places: _Places, state_dict: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for parent, those in places:
        here = _at(state_dict, parent)
        for name, key in those:
            yield name, here[key]
