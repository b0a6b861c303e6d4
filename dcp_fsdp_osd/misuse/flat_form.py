"""Flat state where it does not belong: found by its form, named in the error.

The flat form (numbers for keys, 1-D pieces for values) looks to stock PyTorch like any optimizer's
state dict, and is right in two places only: under our planners' keys, and in
``optim.load_state_dict``.  Elsewhere one rank's piece would be kept for the whole without a word,
or the error would be of a method deep in FSDP.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import DTensor

from dcp_fsdp_osd.errors import CheckpointMismatchError, LayoutError
from dcp_fsdp_osd.layout.flat import FlatLayout, ParamKind
from dcp_fsdp_osd.tree import dicts, dotted

__all__ = ["FlatStates", "check_rest", "expect_setter", "flat_states"]


def check_rest(
    rest: Mapping[str, Any],
    keys: Mapping[str, Any],
    metadata: Metadata | None = None,
    *,
    with_optims: bool = True,
) -> None:
    """Refuse optimizers in what is to go DCP's default way.

    Args:
        rest: the state dict without what a planner takes itself.
        keys: where the planner has found optimizers.
        metadata: of the checkpoint that is loaded; None for a save.
        with_optims: the planner was made with a model and optimizer; else it takes Statefuls alone.

    Raises:
        LayoutError: (a save) the state dict of another optimizer, whose tensors may be one rank's.
        CheckpointMismatchError: (a load) the same, or an empty dict where the checkpoint has an
            optimizer, which DCP would leave empty.
    """
    planner = "FlatOptimSavePlanner" if metadata is None else "FlatOptimLoadPlanner"
    error = LayoutError if metadata is None else CheckpointMismatchError
    saved = metadata.state_dict_metadata if metadata is not None else {}
    for path, value in dicts(rest):
        where = dotted(path)
        if not value:
            what = "an empty dict, which would stay empty, where the checkpoint has an optimizer"
            wrong = any(key.startswith(f"{where}.param_groups") for key in saved)
        else:
            what = (
                "the state dict of another optimizer with parameter numbers for keys, of which "
                "DCP's default way would keep one rank's pieces"
            )
            wrong = _looks_flat(value) if with_optims else _has_numbers(value)
        if wrong:
            several = "".join(f"{key!r}: ..., " for key in keys)
            remedy = (
                f"the planner a mapping from key to optimizer, "
                f"{planner}(model, {{{several}{where!r}: optim}})"
                if several
                else f"{planner}(model, optim, key={where!r})"
            )
            raise error(
                f"expected optimizers under {_list(keys)} only, found at {where!r} {what}: put "
                f"FlatOptimState(model, optim) there, which needs no argument of the planner, or "
                f"pass {remedy}"
            )


def _list(keys: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, keys)) or "no key"


def _has_numbers(value: Mapping[Any, Any]) -> bool:
    """Whether it is an optimizer's own state dict."""
    groups = value.get("param_groups")
    return (
        isinstance(value.get("state"), Mapping)
        and isinstance(groups, list)
        and any(isinstance(n, int) for group in groups for n in group.get("params", ()))
    )


def _looks_flat(value: Mapping[Any, Any]) -> bool:
    """Whether it is an optimizer's state dict that may hold pieces of FSDP1's flat tensors."""
    states, groups = value.get("state"), value.get("param_groups")
    if not isinstance(states, Mapping) or not isinstance(groups, list):
        return False
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return False
    tensors = [
        tensor
        for number, state in states.items()
        if isinstance(number, int) and isinstance(state, Mapping)
        for tensor in state.values()
        if isinstance(tensor, torch.Tensor) and tensor.dim()
    ]
    return bool(tensors) and all(t.dim() == 1 and not isinstance(t, DTensor) for t in tensors)


class FlatStates(dict[Any, Any]):
    """``state`` in the flat form of an FSDP1 optimizer; an error where names are looked up in it.

    ``set_optimizer_state_dict`` does that; ``optim.load_state_dict`` does not. Pickled and copied
    as an ``OrderedDict``.
    """

    fqns: frozenset[str] = frozenset()

    def __contains__(self, key: object) -> bool:
        if super().__contains__(key):
            return True
        if isinstance(key, str) and key in self.fqns:
            raise CheckpointMismatchError(
                f"expected state under names such as {key!r}, found the flat form, with numbers: "
                f"load it with optim.load_state_dict, or fill an empty dict with "
                f"FlatOptimLoadPlanner(..., form='sharded') for set_optimizer_state_dict"
            )
        return False

    def __reduce__(self) -> tuple[Any, ...]:
        return collections.OrderedDict, (), None, None, iter(self.items())


def flat_states(states: dict[Any, Any], layout: FlatLayout) -> dict[Any, Any]:
    """``states`` by number, guarded where stock's setter could not know what they are."""
    flat = any(param.kind is ParamKind.FLAT for param in layout.params)
    if not flat or any(isinstance(key, str) for key in states):
        return states
    guarded = FlatStates(states)
    guarded.fqns = frozenset(layout.ids)
    return guarded


def expect_setter(optim: torch.optim.Optimizer, layout: FlatLayout, form: str) -> None:
    """A dict of this form was filled: refuse it in ``optim.load_state_dict``.

    That takes parameters by position and tensors as they are, so that whole tensors would silently
    replace pieces. A hook of torch's own kind, until a state dict that is right was loaded.
    """
    if not isinstance(optim, torch.optim.Optimizer):
        return

    expected: FlatLayout | None = layout

    def check(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        nonlocal expected
        if expected is not None and _is_setters(state_dict, expected):
            raise CheckpointMismatchError(
                f"expected the flat form in optim.load_state_dict, found what was filled with "
                f"form={form!r}, which only set_optimizer_state_dict(model, optim, ...) can load: "
                f"call that, or fill the dict with form='flat'"
            )
        expected = None  # the hook itself, removed here, would end the optimizer's loop over them

    optim.register_load_state_dict_pre_hook(check)


def _is_setters(state_dict: Mapping[str, Any], layout: FlatLayout) -> bool:
    """Whether ``optim.load_state_dict`` would misunderstand it."""
    if "param_groups" not in state_dict:
        return True  # nothing at all, on ranks other than 0
    order = [layout.params[number].fqns for numbers in layout.groups for number in numbers]
    names = [name for group in state_dict["param_groups"] for name in group["params"]]
    for position, name in enumerate(names):
        if not isinstance(name, str):
            continue
        fqn = layout.resolve(name)
        if fqn is None:
            continue
        param = layout.params[layout.ids[fqn]]
        tensors = [
            t
            for t in state_dict["state"].get(name, {}).values()
            if isinstance(t, torch.Tensor) and t.dim()
        ]
        plain = any(not isinstance(tensor, DTensor) for tensor in tensors)
        moved = position >= len(order) or fqn not in order[position]
        if param.kind is ParamKind.FLAT or moved or (param.kind is ParamKind.DTENSOR and plain):
            return True
    return False
