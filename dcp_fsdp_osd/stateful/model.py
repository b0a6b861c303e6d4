"""FlatModelState: a model's weights as DCP saves them, from each rank's own memory.

``get_model_state_dict`` gathers every FSDP1 unit to cut it again.  Here each FQN has this rank's
piece of the flat parameter (1-D, a view), and the planners write and read it as boxes, as they do
with optimizer state.  What FSDP1 does not manage lies beside it as ever: buffers, other parameters,
``_extra_state``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from dcp_fsdp_osd.errors import LayoutError, listed
from dcp_fsdp_osd.fsdp.names import join_name, module_names
from dcp_fsdp_osd.fsdp.optim import unmet_params
from dcp_fsdp_osd.fsdp.weights import drop_unsharded, flat_shards, low_precision_buffers
from dcp_fsdp_osd.layout.flat import Segment
from dcp_fsdp_osd.layout.placements import dtensor_problem
from dcp_fsdp_osd.misuse.arguments import check_model
from dcp_fsdp_osd.misuse.own_group import check_own_group
from dcp_fsdp_osd.stateful.guard import GUARD_KEY, Guard, NotADict, without_guard

__all__ = ["FlatModelState", "ModelGuard"]

_EXTRA_STATE = "_extra_state"


@dataclass(eq=False)
class ModelGuard(Guard):
    """What the planners need to know of the dict in which this lies; stops other planners.

    Attributes:
        segments: FQN -> the elements of it that this rank holds; of FSDP1's parameters.
        shard_groups: FQN -> which FSDP group this rank is of (``ParamLayout.shard_group``).
        tied: name -> the first name of the same tensor.
        dtypes: buffers that FSDP1 keeps in a lower precision -> dtype that is saved.
        extra: names that hold a module's extra state, which may be anything.
        problem: why it cannot be saved or loaded, of which other ranks may not know.
        loaded: set by the load planner.
    """

    owner, pieces = "FlatModelState", "flat parameters"

    segments: dict[str, Segment] = field(default_factory=dict)
    shard_groups: dict[str, int] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    extra: tuple[str, ...] = ()
    problem: str = ""
    loaded: bool = False


class FlatModelState(NotADict, Stateful):
    """A model's weights as a DCP ``Stateful``: saved, and loaded in place, with no gather.

    ``dcp.save`` and ``dcp.load`` call :meth:`state_dict` and :meth:`load_state_dict`; both need
    our planners, which need no argument for it, and a stock planner raises. The checkpoint is the
    one of ``get_model_state_dict(model)``, which reads it, as this reads that one's, at any world
    size and wrapping.

    Args:
        model: FSDP1 at any place in it, FSDP2, DDP or plain. With FSDP1 no module of it may change
            its own state dict (hooks, or a ``state_dict`` of its own), as FSDP's pieces are taken
            past that; without FSDP1 ``get_model_state_dict`` is called, which gathers nothing.

    Tensors are the model's own, full precision (``MixedPrecision`` and CPU offload do not
    matter). They are loaded in place, cast to the model's dtype where it differs, as by
    ``load_state_dict``. Tied parameters are saved under each of their names; of these the first
    that the checkpoint has is loaded. Buffers that differ between ranks are saved from one,
    with a warning.

    Replaces ``FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT)``.
    """

    def __repr__(self) -> str:
        return f"FlatModelState({type(self.model).__name__})"

    def __init__(self, model: nn.Module) -> None:
        check_model(model, type(self).__name__)
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        """FQN -> this rank's piece (1-D) of what FSDP1 shards, or the value itself; and a guard.

        Raises:
            LayoutError: FSDP1 is in forward, backward or ``summon_full_params``, or a module
                changes its own state dict.
            ValueError: called by ``dcp.async_save`` over the group that training uses.
        """
        check_own_group()
        guard = ModelGuard(problem="\n".join(unmet_params(self.model, replaced=False).values()))
        values: dict[str, Any] = {GUARD_KEY: guard}
        if guard.problem:
            return values  # raised where all ranks learn of it
        groups = list(_names_of_tensors(self.model))
        if _has_fsdp1(self.model):
            taken: set[tuple[int, str]] = set()
            for shard in flat_shards(self.model):
                taken.update((id(module), name) for module, name in shard.places)
                for fqn in shard.names:
                    values[fqn] = shard.local
                    guard.segments[fqn] = shard.segment
                    guard.shard_groups[fqn] = shard.shard_group
                    guard.tied[fqn] = shard.names[0]
            _check_hooks(self.model, {module for module, _ in taken})
            values.update(_outside(self.model, taken))
            dtypes = low_precision_buffers(self.model)
            guard.dtypes = {name: dtype for name, dtype in dtypes.items() if name in values}
        else:
            values.update(get_model_state_dict(self.model))
        for fqn, value in values.items():
            if isinstance(value, DTensor):
                guard.problem = guard.problem or dtensor_problem(fqn, value)
        for names in groups:
            known = [name for name in names if name in values and name not in guard.segments]
            guard.tied.update((name, known[0]) for name in known)
        guard.extra = tuple(name for name, _ in _extra_states(self.model) if name in values)
        return values

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Finish what :class:`FlatOptimLoadPlanner` has loaded in place. No collective.

        Raises:
            CheckpointMismatchError: the state dict was not loaded by our planner.
        """
        ModelGuard.check_loaded(state_dict)
        if not _has_fsdp1(self.model):
            set_model_state_dict(self.model, without_guard(state_dict))
            return
        drop_unsharded(self.model)
        for name, module in _extra_states(self.model):
            if name in state_dict:
                module.set_extra_state(state_dict[name])


def _has_fsdp1(model: nn.Module) -> bool:
    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


def _names_of_tensors(model: nn.Module) -> Iterator[list[str]]:
    """For each parameter and buffer all its names."""
    names: dict[int, list[str]] = {}
    for module, prefixes in module_names(model).items():
        for named in (module._parameters, module._buffers):
            for name, tensor in named.items():
                if tensor is not None:
                    names.setdefault(id(tensor), []).extend(join_name(p, name) for p in prefixes)
    yield from names.values()


def _outside(model: nn.Module, taken: set[tuple[int, str]]) -> Iterator[tuple[str, Any]]:
    """What ``model.state_dict()`` has beside FSDP1's parameters."""
    for module, prefixes in module_names(model).items():
        values: dict[str, Any] = {}
        for name, param in module._parameters.items():
            flat = getattr(param, "_is_flat_param", False)
            if param is not None and not flat and (id(module), name) not in taken:
                values[name] = param.detach()
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                values[name] = buffer.detach()
        if _has_extra_state(module):
            values[_EXTRA_STATE] = module.get_extra_state()
        for prefix in prefixes:
            yield from ((join_name(prefix, name), value) for name, value in values.items())


def _has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def _extra_states(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for module, prefixes in module_names(model).items():
        if _has_extra_state(module):
            yield from ((join_name(prefix, _EXTRA_STATE), module) for prefix in prefixes)


_METHODS = ("state_dict", "_save_to_state_dict", "load_state_dict", "_load_from_state_dict")
_HOOKS = (
    "_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_KNOWN = ("torch.nn.", "torch.distributed.", "torch._dynamo.")


def _check_hooks(model: nn.Module, flat: set[int]) -> None:
    """Raise for modules whose state dict is more than their parameters and buffers; `flat` are
    the ids of those with parameters that FSDP1 has flattened."""
    found = []
    for module, (name, *_) in module_names(model).items():
        parts = [] if _is_stateless(module, flat) else _methods(module)
        parts += [(h, hook) for h in _HOOKS for hook in getattr(module, h, {}).values()]
        for kind, function in parts:
            if not _origin(function).startswith(_KNOWN):
                found.append(f"{name or 'the model'} ({type(module).__qualname__}): {kind}")
    if found:
        raise LayoutError(
            "expected modules whose state dict is their parameters and buffers, found some that "
            "change it or want to know when it is loaded, which FlatModelState passes over:\n  "
            + listed(dict.fromkeys(found))
            + "\nSave this model with get_model_state_dict and load it with set_model_state_dict"
        )


def _methods(module: nn.Module) -> list[tuple[str, Any]]:
    return [(method, getattr(type(module), method)) for method in _METHODS]


def _is_stateless(module: nn.Module, flat: set[int]) -> bool:
    """Whether there is nothing of it to save: it may have a ``state_dict`` of its own then, as
    torchmetrics' metrics have."""
    tensors = (*module.parameters(), *module.buffers())
    return not tensors and flat.isdisjoint(map(id, module.modules())) and not module.state_dict()


def _origin(function: Any) -> str:
    """The module in which a function, method, partial or wrapped hook was defined."""
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif type(function).__name__ == "_WrappedHook":
            function = function.hook
        else:
            return str(getattr(function, "__module__", "")) + "."
