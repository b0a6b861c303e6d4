"""The unpickler's fuzz: a little of it always, ten minutes of it among the slow tests."""

from __future__ import annotations

import pytest

from tests.storage.fuzz_metadata import fuzz


@pytest.mark.parametrize(
    ("seconds", "least"), [(5.0, 20), pytest.param(600.0, 5000, marks=pytest.mark.slow)]
)
def test_the_unpickler_holds(seconds: float, least: int) -> None:
    count, _, _ = fuzz(seconds)
    assert count >= least
