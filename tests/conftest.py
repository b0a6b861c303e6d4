"""Shared by all tests: worker ranks end with the session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import close_pool
from tests.torch_gaps import complete_torch, gap_in

complete_torch()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A test of what the installed torch itself does not have is skipped, with that reason."""
    try:
        return (yield)
    except Exception as error:
        gap = gap_in(error)
        if gap is None:
            raise
    pytest.skip(gap)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    close_pool()
