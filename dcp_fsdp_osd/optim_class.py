"""Whose state a checkpoint has: the optimizer's class, and whether another class can use it.

Two optimizers may keep state of the same shapes, even under the same names, that mean something
else. So a save records the class, and a load into another one says so. Whether a class can use
state is asked of the class itself, where it is one of PyTorch's: a step of it on two zeros.
"""

from __future__ import annotations

import inspect
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from dcp_fsdp_osd.errors import listed, several

__all__ = ["OptimClass", "describe_optim"]

_PLAIN = {"foreach": False, "fused": False, "capturable": False, "differentiable": False}
"""Options that say how a step is computed, not what it needs."""


def describe_optim(optim: torch.optim.Optimizer) -> dict[str, Any]:
    """Class and defaults of an optimizer as JSON; of values that JSON has not, the type."""
    kind = type(optim)
    defaults: Mapping[str, Any] = getattr(optim, "defaults", {})  # `_NamedOptimizer` has none
    return {
        "class": f"{kind.__module__}.{kind.__qualname__}",
        "defaults": {str(name): _json(value) for name, value in defaults.items()},
    }


def _json(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and not value.dim():
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_json(item) for item in value]
    return f"<{type(value).__qualname__}>"


class OptimClass:
    """An optimizer's class beside the one that a checkpoint's state is of.

    Args:
        optim: is not stepped, and not changed.
        saved: what :func:`describe_optim` gave at the save, on each of the ranks that differ in
            it; nothing if it is not known.
        replaced: names of group options that the checkpoint has.
    """

    def __init__(
        self,
        optim: torch.optim.Optimizer,
        saved: Sequence[Mapping[str, Any]],
        replaced: Iterable[str],
    ) -> None:
        self._optim = optim
        self._saved = saved
        self._replaced = set(replaced)
        self.name = type(optim).__qualname__
        mine = _identity(describe_optim(optim)["class"])
        self.same = any(_identity(str(each.get("class"))) == mine for each in saved)
        self._groups = [group for group in optim.param_groups for _ in group["params"]]
        self._asked: dict[Any, Any] = {}
        self._foreign: dict[tuple[str, ...], list[str]] = {}  # names of state -> FQNs

    @property
    def differs(self) -> bool:
        """Whether the checkpoint's state is known to be of another class."""
        return bool(self._saved) and not self.same

    def saved_by(self) -> str:
        """Class and defaults, in words."""
        words = []
        for each in self._saved:
            defaults = ", ".join(f"{k}={v!r}" for k, v in dict(each.get("defaults", {})).items())
            words.append(f"{each.get('class')}({defaults})")
        return " and ".join(words) or "an optimizer that it does not name"

    def check(
        self,
        number: int,
        fqns: Sequence[str],
        dims: int,
        names: frozenset[str],
        *,
        current: frozenset[str] = frozenset(),
    ) -> str:
        """Why a step could not use the state that is saved of a parameter; empty if it could.

        What is not the optimizer's own state is kept in mind for :meth:`warn`.

        Args:
            number: of the parameter, whose group's options count.
            dims: of the parameter on this rank.
            names: of the state that is saved.
            current: of the state that it is loaded into, if there is any.
        """
        if not names:
            return ""
        missing = "" if current else self.lacking(number, dims, names)
        if missing:
            return (
                f"expected {missing!r} in the checkpoint, without which {self.name} does not make "
                f"a step, found state {', '.join(sorted(names))} of {self.saved_by()}"
            )
        makes = current or self.makes(number, dims)
        if makes is not None and names - makes:
            self._foreign.setdefault(tuple(sorted(names - makes)), []).extend(fqns)
        return ""

    def warn(self, key: str) -> None:
        """Say that state and options of another optimizer are taken over, if they are."""
        lines = []
        if self.differs:
            options = ", ".join(sorted(self._replaced)) or "all options"
            lines.append(
                f"the checkpoint was saved by {self.saved_by()}, this optimizer is {self.name}; "
                f"of the checkpoint's param groups are taken: {options}"
            )
        for names, fqns in self._foreign.items():
            lines.append(
                f"state that {self.name} does not keep is loaded: {', '.join(names)} "
                f"(of {several(fqns, 3)})"
            )
        if lines:
            warnings.warn(f"{key}: {listed(lines)}", stacklevel=2)

    def lacking(self, number: int, dims: int, names: frozenset[str]) -> str:
        """The first state that a step would look for and not find; empty if none, or unknown."""
        group = self._groups[number]
        # With the checkpoint's own options a step may need more, never less than with none set.
        off = {n: type(v)(0) for n, v in group.items() if n in self._replaced and _is_number(v)}
        found = self._ask({**group, **off}, dims, names)
        return found if isinstance(found, str) else ""

    def makes(self, number: int, dims: int) -> frozenset[str] | None:
        """Names of the state that a first step makes for a parameter; None if unknown."""
        found = self._ask(self._groups[number], dims, frozenset())
        return found if isinstance(found, frozenset) else None

    def _ask(self, group: Mapping[str, Any], dims: int, names: frozenset[str]) -> Any:
        """Names of the state after a step, or the one that was missing; None if unknown."""
        if self.same or not f"{type(self._optim).__module__}.".startswith("torch.optim."):
            return None  # a step of anyone else's may do anything
        options = {n: v for n, v in group.items() if n not in ("params", "param_names")}
        key = repr(sorted(options.items(), key=lambda item: item[0])), dims, names
        if key not in self._asked:
            self._asked[key] = _step(self._optim, options, dims, names)
        return self._asked[key]


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float)


def _identity(name: str) -> tuple[str, str]:
    """Package and class: modules within a package move between its versions."""
    return name.partition(".")[0], name.rpartition(".")[2]


def _step(
    optim: torch.optim.Optimizer, options: Mapping[str, Any], dims: int, names: frozenset[str]
) -> frozenset[str] | str | None:
    """A step of the class on a parameter of its own, with zeros for state and gradient."""
    kind = type(optim)
    param = torch.zeros((2,) * dims)
    param.grad = torch.zeros_like(param)
    state: defaultdict[torch.Tensor, dict[str, Any]] = defaultdict(dict)
    if names:
        zeros = {name: torch.zeros(() if name == "step" else (2,) * dims) for name in names}
        state[param] = zeros
    group = {**options, **{n: v for n, v in _PLAIN.items() if n in options}, "params": [param]}
    probe = kind.__new__(kind)
    try:
        defaults = dict(optim.defaults)
        probe.__setstate__({"defaults": defaults, "state": state, "param_groups": [group]})
        with torch.no_grad():
            inspect.unwrap(kind.step)(probe)  # without the hooks that are set for all optimizers
    except KeyError as error:
        (missing, *_) = error.args or ("",)
        return missing if isinstance(missing, str) and missing not in options else None
    except Exception:  # LBFGS wants a closure, SparseAdam a sparse gradient, Muon two dimensions
        return None
    return frozenset(map(str, state[param]))
