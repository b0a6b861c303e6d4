"""Where optimizers lie in a state dict that is saved or loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .errors import LayoutError

__all__ = ["find_optim", "with_optim_removed"]


def find_optim(state_dict: Mapping[str, Any], key: str) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The optimizer's state dict under ``key``, and its path.

    Args:
        key: a key of ``state_dict``, or keys joined by dots for a nested place (``"app.optim"``).

    Raises:
        LayoutError: nothing is there, or something that is no dict.
    """
    path = (key,) if key in state_dict else tuple(key.split("."))
    value: Any = state_dict
    for step in path:
        if not isinstance(value, Mapping) or step not in value:
            raise LayoutError(
                f"expected the optimizer's state dict under {key!r}, found only "
                f"{sorted(map(str, state_dict))}; pass key= to the planner"
            )
        value = value[step]
    if not isinstance(value, dict):
        raise LayoutError(
            f"expected the state dict of an optimizer under {key!r} (optim.state_dict(), a "
            f"FlatOptimState, or for a load an empty dict), found {type(value).__name__}"
        )
    return path, value


def with_optim_removed(
    state_dict: Mapping[str, Any], paths: Sequence[tuple[str, ...]]
) -> dict[str, Any]:
    """A copy of ``state_dict`` without what lies at ``paths``; other values are shared."""
    result = dict(state_dict)
    for path in paths:
        here = result
        for step in path[:-1]:
            here[step] = dict(here[step])
            here = here[step]
        del here[path[-1]]
    return result
