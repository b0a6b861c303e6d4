"""Shared by all tests: worker ranks end with the session."""

from __future__ import annotations

import pytest

from tests.ranks import close_pool
from tests.torch_gaps import complete_cpu_streams

complete_cpu_streams()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    close_pool()
