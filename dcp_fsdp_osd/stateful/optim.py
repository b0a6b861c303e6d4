"""FlatOptimState: an optimizer's own state dict as a DCP Stateful, with its layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from dcp_fsdp_osd.errors import LayoutError
from dcp_fsdp_osd.fsdp.optim import Target, describe_target
from dcp_fsdp_osd.layout.flat import FlatLayout
from dcp_fsdp_osd.misuse.arguments import check_optim
from dcp_fsdp_osd.misuse.own_group import check_own_group
from dcp_fsdp_osd.optim_class import describe_optim
from dcp_fsdp_osd.stateful.guard import GUARD_KEY, Guard, NotADict

__all__ = ["FlatOptimState", "OptimGuard"]


@dataclass(eq=False)
class OptimGuard(Guard):
    """What the planners need to know of the optimizer whose state dict this lies in.

    Attributes:
        layout: of the optimizer, when its state dict was taken; None with a problem.
        optimizer: its class and defaults (``describe_optim``).
        target, optim: what a load is planned with; copies, and other processes, have the layout
            alone.
        problem: why it cannot be saved or loaded, of which other ranks may not know.
    """

    layout: FlatLayout | None = None
    optimizer: dict[str, Any] | None = None
    problem: str = ""
    loaded: bool = False
    target: Target | None = None
    optim: torch.optim.Optimizer | None = None

    @classmethod
    def of(cls, model: nn.Module, optim: torch.optim.Optimizer) -> OptimGuard:
        try:
            target = describe_target(model, optim)
        except LayoutError as error:
            return cls(problem=str(error))
        return cls(target.layout, describe_optim(optim), target=target, optim=optim)

    def known(self) -> FlatLayout:
        """The layout, where all ranks learn of an error of this one's."""
        self.check()
        if self.layout is None:
            raise LayoutError("expected the guard of a FlatOptimState to have its layout")
        self.layout.check()
        return self.layout

    def __reduce__(self) -> tuple[Any, ...]:
        return OptimGuard, (self.layout, self.optimizer, self.problem, self.loaded)

    def __deepcopy__(self, memo: Any) -> OptimGuard:
        return OptimGuard(self.layout, self.optimizer, self.problem, self.loaded)


class FlatOptimState(NotADict, Stateful):
    """An FSDP optimizer as a DCP ``Stateful``: saved and loaded in place with no gather.

    ``dcp.save`` and ``dcp.load`` call :meth:`state_dict` and :meth:`load_state_dict`; both need
    our planners, which learn from it what this rank holds and need no argument for it; a stock
    planner raises rather than keep one rank's piece as the whole.

    Args:
        model: the wrapped model; read for its layout with each state dict.
        optim: its optimizer; not stepped, and changed by :meth:`load_state_dict` alone.

    Raises:
        TypeError: from the constructor, for arguments of another kind.

    Source: does for the flat form what ``torch.distributed.checkpoint.state_dict`` does with
    gathered tensors.
    """

    def __repr__(self) -> str:
        return f"FlatOptimState({type(self.model).__name__}, {type(self.optim).__name__})"

    def __init__(self, model: nn.Module, optim: torch.optim.Optimizer) -> None:
        check_optim(model, optim, type(self).__name__)
        self.model = model
        self.optim = optim

    def state_dict(self) -> dict[str, Any]:
        """``optim.state_dict()`` (its tensors, not copies), with its layout, and a guard against
        other planners.

        Raises:
            ValueError: called by ``dcp.async_save`` over the group that training uses.
        """
        check_own_group()
        return {GUARD_KEY: OptimGuard.of(self.model, self.optim), **self.optim.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what :class:`FlatOptimLoadPlanner` has loaded.

        ``optim.load_state_dict`` casts floating-point state to its parameter's dtype; here
        state keeps the dtype that it was saved with.

        Raises:
            CheckpointMismatchError: the state dict was not loaded by our planner.
        """
        OptimGuard.check_loaded(state_dict)
        loaded = {k: v for k, v in state_dict.items() if k != GUARD_KEY}
        self.optim.load_state_dict(loaded)
        params = [p for group in self.optim.param_groups for p in group["params"]]
        for number, state in loaded["state"].items():
            if isinstance(number, int) and number < len(params):
                self.optim.state[params[number]] = _as_saved(
                    state, self.optim.state[params[number]]
                )


def _as_saved(saved: Any, cast: Any) -> Any:
    """``cast`` (by ``Optimizer.load_state_dict``) with the dtypes and objects of ``saved``.

    What the optimizer itself made of a value (a tensor of a float ``step``) and where it
    put a tensor stays.
    """
    if isinstance(saved, Mapping) and isinstance(cast, Mapping):
        restored = {k: _as_saved(v, cast[k]) if k in cast else v for k, v in saved.items()}
        return {**cast, **restored}
    if isinstance(saved, torch.Tensor) and isinstance(cast, torch.Tensor):
        return cast if cast.dtype == saved.dtype else saved.to(cast.device)
    return cast if isinstance(cast, torch.Tensor) else saved
