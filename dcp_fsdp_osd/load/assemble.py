"""An optimizer's state dict in the flat form, put together from values that were read."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dcp_fsdp_osd.checkpoint import CheckpointIndex
from dcp_fsdp_osd.containers import Containers, containers_of, remade
from dcp_fsdp_osd.errors import Mismatch
from dcp_fsdp_osd.fsdp.optim import Target
from dcp_fsdp_osd.layout.flat import FlatLayout, param_id
from dcp_fsdp_osd.load.current import Current
from dcp_fsdp_osd.load.groups import put_value
from dcp_fsdp_osd.load.protocol import StateCodec
from dcp_fsdp_osd.load.schedule import Kind, Leaf, LoadSchedule
from dcp_fsdp_osd.misuse.flat_form import flat_states
from dcp_fsdp_osd.tree import Path, digest, dotted, set_leaf, text_keys

__all__ = ["Assembly", "saved_containers"]


@dataclass
class Assembly:
    """Makes the state dict, and has what is loaded in place and not by the reads written.

    Attributes:
        objects, scalars: what was read, by key.
        in_groups: names of the parameters in the checkpoint's groups; those without state have
            none.
        strict: what is there and not in the checkpoint goes.
        clashes: what cannot be one optimizer's state.
    """

    target: Target
    index: CheckpointIndex
    current: Current
    schedule: LoadSchedule
    codec: StateCodec
    objects: Mapping[str, Any]
    scalars: Mapping[str, torch.Tensor]
    in_groups: set[str]
    strict: bool
    clashes: list[Mismatch] = field(default_factory=list)
    _scalars_in_place: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    @property
    def layout(self) -> FlatLayout:
        return self.target.layout

    def make(self, groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The state dict; ``groups`` as of :func:`~dcp_fsdp_osd.load.groups.match_groups`."""
        if not self.index.knows_containers:
            groups = [
                remade(group, containers_of(now, (), strict=False))
                for group, now in zip(groups, self.current.groups, strict=True)
            ]
        ids = self.current.group_ids()
        extras: dict[Any, Any] = {}
        paths = [leaf.path for leaf in self.schedule.leaves if leaf.extra]
        state = flat_states(self._state(groups), self.layout)
        for leaf in self.schedule.leaves:
            if leaf.extra:
                set_leaf(extras, leaf.path, self._value(leaf))
        return {
            "state": state,
            "param_groups": [
                {**group, "params": names} for group, names in zip(groups, ids, strict=True)
            ],
            **remade(extras, self._containers(self.index.containers, self.current.extras, paths)),
        }

    def write_in_place(self) -> None:
        """Write what reads do not: scalars, and zeros of FQNs that were saved without state.

        Fresh tensors have zeros there already; FQNs that are skipped (which ``strict=False``
        admits) keep what they have.
        """
        for tensor, value in self._scalars_in_place:
            tensor.copy_(value)
        for leaf in self.schedule.leaves:
            if leaf.kind is not Kind.PIECE or not leaf.in_place:
                continue
            if leaf.param is None or leaf.tensor is None:
                continue
            for segment in self.layout.params[leaf.param].segments:
                if segment.fqn in self.schedule.skip or segment.fqn in leaf.sources:
                    continue
                if self.in_groups.intersection(self.layout.names_of(segment.fqn)):
                    leaf.tensor[segment.offset : segment.offset + segment.numel].zero_()

    def _state(self, groups: Sequence[Mapping[str, Any]]) -> dict[Any, Any]:
        names = {param_id(n, self.layout): n for ids in self.current.group_ids() for n in ids}
        keys = {param_id(key, self.layout): key for key in self.current.states}
        encoded = self.current.encoded.get("state", {})
        leaves_of: dict[int | None, list[Leaf]] = {}
        for leaf in self.schedule.leaves:
            if leaf.kind not in (Kind.OPTION, Kind.SKIPPED) and not leaf.extra:
                leaves_of.setdefault(leaf.param, []).append(leaf)
        capturable = {
            number
            for group, numbers in zip(groups, self.layout.groups, strict=True)
            if group.get("fused") or group.get("capturable")
            for number in numbers
        }
        plain: Mapping[str, Any] = self.objects.get(self.index.one_state or "", {})
        without_tensors = {param_id(name, self.layout): value for name, value in plain.items()}
        state: dict[Any, Any] = {}
        for number, param in enumerate(self.layout.params):
            kept = encoded.get(keys.get(number))
            loaded = leaves_of.get(number, ())
            if number in self.schedule.keep:
                values = kept
            elif param.empty and not loaded:
                values = self._initial(number, kept)
            else:
                values = {} if kept is None or self.strict else text_keys(kept)
                values.update(without_tensors.get(number) or {})
                for leaf in loaded:
                    put_value(values, leaf.path, self._value(leaf, number in capturable))
            if values:
                self.codec.decode(number, values)
                state[names[number]] = values
                if values is not kept:
                    saved = saved_containers(self.index, self.layout, number)
                    mine = self.current.states.get(keys.get(number), {})
                    containers = self._containers(saved, mine, [leaf.path for leaf in loaded])
                    state[names[number]] = remade(values, containers)
        return {**state, **self._user_state(leaves_of.get(None, ()))}

    def _user_state(self, loaded: Sequence[Leaf]) -> dict[Any, Any]:
        """State that is no parameter's."""
        mine = {k: v for k, v in self.current.states.items() if param_id(k, self.layout) is None}
        state: dict[Any, Any] = {}
        for leaf in loaded:
            set_leaf(state, (leaf.name, *leaf.path), self._value(leaf))
        saved = self.index.containers.below(("state",))
        paths = [(leaf.name, *leaf.path) for leaf in loaded]
        kept = {key: value for key, value in mine.items() if str(key) not in state}
        return {**remade(state, self._containers(saved, mine, paths)), **kept}

    def _initial(self, number: int, kept: Any) -> Any:
        """What an optimizer that makes its state early has for a parameter without elements."""
        if kept is not None:
            return kept
        return copy.deepcopy(self.current.optim_state.get(self.target.params[number], None))

    def _value(self, leaf: Leaf, capturable: bool = False) -> Any:
        """What was read of ``leaf``; one that must not be used is a clash."""
        if leaf.kind not in (Kind.OBJECT, Kind.SCALAR):
            return leaf.tensor
        read = self.objects if leaf.kind is Kind.OBJECT else self.scalars
        values = {fqn: read[key] for fqn, key in leaf.sources.items()}
        if len({digest(value) for value in values.values()}) > 1:
            self.clashes.append(
                Mismatch(
                    dotted(leaf.path),
                    found=", ".join(f"{fqn}: {_plain(v)}" for fqn, v in values.items()),
                    expected="one value for parameters that are one flat parameter here",
                )
            )
        value = next(iter(values.values()))
        if leaf.tensor is not None:
            self._scalars_in_place.append((leaf.tensor, value))
            return leaf.tensor
        if isinstance(value, torch.Tensor) and leaf.param is not None and capturable:
            value = value.to(self.target.devices[leaf.param])
        return value

    def _containers(self, saved: Containers, current: Any, paths: Sequence[Path]) -> Containers:
        """``saved``, and those of ``current`` where the checkpoint does not say.

        Args:
            paths: of the values that were loaded.
        """
        mine = containers_of(current, (), strict=False)
        if self.index.knows_containers:
            known = {path[:n] for path in paths for n in range(len(path))}
            mine = Containers((path, each) for path, each in mine.items() if path not in known)
        mine.update(saved)
        return mine


def saved_containers(index: CheckpointIndex, layout: FlatLayout, number: int) -> Containers:
    """The mappings that the checkpoint has of one parameter's state."""
    names = [name for fqn in layout.params[number].fqns for name in layout.names_of(fqn)]
    containers = Containers()
    for name in reversed(names):
        containers.update(index.containers.below(("state", name)))
    return containers


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value
