"""Which values of a parameter always run; see also the marker ``each_value``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["always"]


def always(chosen: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """All ``values`` for ``parametrize``: those that are ``chosen`` always run, others are slow."""
    chosen, values = list(chosen), list(values)
    strange = [value for value in chosen if value not in values]
    assert not strange, f"{strange} are none of {values}"
    return [
        value if value in chosen else pytest.param(value, marks=pytest.mark.slow)
        for value in values
    ]
