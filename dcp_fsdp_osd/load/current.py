"""What is loaded into: the optimizer's own state dict, or an empty one, and what it has for keys.

Read here, never changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dcp_fsdp_osd.checkpoint import is_flattened
from dcp_fsdp_osd.layout.flat import FlatLayout, param_id, without_wrappers
from dcp_fsdp_osd.load.protocol import StateCodec
from dcp_fsdp_osd.stateful.guard import is_guarded, without_guard
from dcp_fsdp_osd.tree import Path, leaves

__all__ = ["Current", "is_flat_form", "unwrapped"]


class Current:
    """The current optimizer's side of a load.

    Args:
        value: the dict that is loaded into; ``{}`` if it is to be made anew.
        optim: read for what ``value`` does not have.

    Attributes:
        given: ``value`` without its guard.
        encoded: the same in the form that is saved (:meth:`encode`).
        own_names: names in ``state`` that are no parameter's, in ``value`` or in the optimizer.
    """

    def __init__(
        self, value: Mapping[str, Any], optim: torch.optim.Optimizer, layout: FlatLayout
    ) -> None:
        self.given: Mapping[str, Any] = without_guard(value)
        self.encoded: Mapping[str, Any] = self.given
        self.optim_state: Mapping[torch.Tensor, Any] = optim.state
        self._optim_groups: Sequence[Mapping[str, Any]] = optim.param_groups
        self._group_names = _group_names(optim, layout)
        self._layout = layout
        names = [*self.states, *(name for name in optim.state if isinstance(name, str))]
        self.own_names = {str(name) for name in names if param_id(name, layout) is None}

    def encode(self, codec: StateCodec) -> None:
        self.encoded = codec.encode(self.given)

    def release(self) -> None:
        """Let go of the state dict."""
        self.given = self.encoded = {}

    @property
    def states(self) -> Mapping[Any, Any]:
        """``state`` as the optimizer has it."""
        states: Mapping[Any, Any] = self.given.get("state", {})
        return states

    @property
    def extras(self) -> dict[str, Any]:
        """What lies beside ``state`` and ``param_groups``."""
        return {k: v for k, v in self.given.items() if k not in ("state", "param_groups")}

    @property
    def groups(self) -> Sequence[Mapping[str, Any]]:
        own: Sequence[Mapping[str, Any]] | None = self.given.get("param_groups")
        return own or self._optim_groups

    def group_ids(self) -> list[list[Any]]:
        """The parameters of each group as the state dict names them."""
        if self.given.get("param_groups"):
            return [list(group["params"]) for group in self.given["param_groups"]]
        if self._group_names is not None:
            return self._group_names
        return [list(ids) for ids in self._layout.groups]

    def values(self) -> dict[tuple[Any, Path], Any]:
        """The encoded values by owner and path: the owner is a parameter's id or another name in
        ``state``, or None for what lies beside ``state``."""
        values: dict[tuple[Any, Path], Any] = {}
        for name, state in self.encoded.get("state", {}).items():
            number = param_id(name, self._layout)
            owner = str(name) if number is None else number
            values.update(((owner, path), value) for path, value in leaves(state))
        for name, value in self.extras.items():
            values.update(((None, path), leaf) for path, leaf in leaves(value, (str(name),)))
        return values


def unwrapped(name: str, layout: FlatLayout) -> str | None:
    """``name`` without the names of wrappers; None for a flat parameter's own name."""
    if param_id(name, layout) is None or layout.resolve(name) is not None:
        return name
    clean = (n for n in without_wrappers(name) if layout.resolve(n) is not None)
    return next(clean, None)


def is_flat_form(value: Mapping[str, Any], layout: FlatLayout) -> bool:
    """Whether a dict is to be loaded in the flat form: empty, or keyed by parameter ids (or by
    names, with flat values). If not, DCP's default way is the right one."""
    state_dict = without_guard(value)
    if not state_dict or is_guarded(value):
        return True
    if is_flattened(state_dict) or "param_groups" not in state_dict:
        return False
    ids = [n for group in state_dict["param_groups"] for n in group["params"]]
    text = [n for n in ids if not isinstance(n, int)]
    if not text or any(unwrapped(n, layout) != n for n in text):
        return True  # numbers, or names as the wrapped model has them
    flat = False
    for name, state in state_dict["state"].items():
        number = param_id(name, layout)
        if number is None:
            continue
        param = layout.params[number]
        for _, leaf in leaves(state):
            plain = isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor)
            if not plain or not param.sharded or not leaf.dim():
                continue
            whole = tuple(leaf.shape) in param.shapes
            if whole and not param.is_flat_shape(leaf.shape):
                return False
            flat = flat or (not whole and param.is_flat_shape(leaf.shape))
    return flat


def _group_names(optim: torch.optim.Optimizer, layout: FlatLayout) -> list[list[Any]] | None:
    """The parameters of each group as the optimizer's state dict names them, if by names.

    Optimizers that key their state by names pass over what they are given under numbers.
    """
    keys: Sequence[str] | None = getattr(optim, "ordered_param_keys", None)
    if keys is not None:  # `_NamedOptimizer`
        return [[keys[number] for number in ids] for ids in layout.groups]
    if type(optim).state_dict is torch.optim.Optimizer.state_dict:
        return None
    try:
        names = [list(group["params"]) for group in optim.state_dict()["param_groups"]]
    except Exception:  # one that has no state dict yet (ZeroRedundancyOptimizer): as any other
        return None
    ids = ([param_id(name, layout) for name in group] for group in names)
    known = [sorted(number for number in group if number is not None) for group in ids]
    text = all(isinstance(name, str) for group in names for name in group)
    return names if text and known == [sorted(ids) for ids in layout.groups] else None
