"""The loads of a state dict: one for each optimizer in the flat form, and for each model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from dcp_fsdp_osd.errors import LayoutError
from dcp_fsdp_osd.fsdp.optim import Target, check_unwrapped
from dcp_fsdp_osd.load.current import is_flat_form
from dcp_fsdp_osd.load.forms import FormLoad
from dcp_fsdp_osd.load.model import ModelLoad
from dcp_fsdp_osd.load.optim import OptimLoad
from dcp_fsdp_osd.load.protocol import Form, StateLoad
from dcp_fsdp_osd.stateful.guard import guarded
from dcp_fsdp_osd.stateful.model import ModelGuard
from dcp_fsdp_osd.stateful.optim import OptimGuard
from dcp_fsdp_osd.tree import dotted, find_optim

__all__ = ["KnownOptim", "begin_loads", "known_optims"]

KnownOptim = tuple[Target, torch.optim.Optimizer]


def known_optims(
    state_dict: Mapping[str, Any], by_planner: Mapping[str, KnownOptim], *, has_model: bool
) -> dict[str, KnownOptim]:
    """The optimizers in ``state_dict``, by key: the planner's, and those of Statefuls, which know
    better.

    Args:
        has_model: the planner was made with a model, which may have been wrapped since.

    Raises:
        LayoutError: one of them cannot be loaded into.
    """
    known = dict(by_planner)
    for path, _, guard in guarded(state_dict, OptimGuard):
        guard.known()
        if guard.target is None or guard.optim is None:
            raise LayoutError(
                f"{dotted(path)}: expected the state dict of a FlatOptimState as it returned "
                f"it, found a copy, which has lost the optimizer that it is of"
            )
        known[dotted(path)] = guard.target, guard.optim
    for key, (target, optim) in known.items():
        target.layout.check()
        if has_model:
            check_unwrapped(target.layout, target.params)
        expected = tuple(map(len, target.layout.groups))
        sizes = tuple(len(group["params"]) for group in optim.param_groups)
        if sizes != expected:
            raise LayoutError(
                f"{key}: expected param groups of {expected} parameters, found {sizes}: make a new "
                f"planner after add_param_group"
            )
    return known


def begin_loads(
    state_dict: Mapping[str, Any],
    optims: Mapping[str, KnownOptim],
    metadata: Metadata,
    *,
    strict: bool,
    form: Form,
    idle: bool,
) -> dict[str, StateLoad]:
    """What is loaded otherwise than by DCP's default planner, by key.

    Args:
        optims: as of :func:`known_optims`.
        form: what empty dicts are filled with.
        idle: this rank keeps empty dicts empty, if they are not for the flat form.
    """
    loads: dict[str, StateLoad] = {}
    for key, (target, optim) in optims.items():
        path, value = find_optim(state_dict, key)
        if not is_flat_form(value, target.layout):
            continue
        about: Any = {"optim": optim, "metadata": metadata, "strict": strict}
        if value or form == "flat":
            loads[key] = OptimLoad(target, path, value, **about)
        else:
            loads[key] = FormLoad(target, path, value, form=form, idle=idle, **about)
    for path, value, _ in guarded(state_dict, ModelGuard):
        loads[dotted(path)] = ModelLoad(path, value, metadata=metadata)
    return loads
