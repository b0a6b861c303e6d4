"""Shared by all tests: worker ranks end with the session, and which cases always run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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


_LONG = (
    "tests/test_examples.py",
    "tests/test_docs.py",
    "tests/planners/test_matrix.py",
    "tests/planners/test_model_state.py",
    "tests/exchange/test_faults.py",
    "tests/storage/test_faults_proxy.py",
    "tests/storage/test_kill.py",
    "tests/test_long_training.py",
    "tests/soak/test_soak.py",
)
"""What takes longest begins first, so that no process is left with it alone at the end."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test that is marked ``each_value``, what adds no value of any parameter is slow."""
    order = {file: number for number, file in enumerate(_LONG)}
    items.sort(key=lambda item: order.get(item.nodeid.partition("::")[0], len(_LONG)))
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("each_value"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        normal = [case for case in cases if not case.get_closest_marker("slow")]
        chosen = covering(
            [frozenset((k, id(v)) for k, v in case.callspec.params.items()) for case in normal]
        )
        for number, case in enumerate(normal):
            if number not in chosen:
                case.add_marker("slow")


def covering(cases: Sequence[frozenset[tuple[str, int]]]) -> set[int]:
    """Positions of a few cases with all values of all parameters, the same in each run."""
    missing = frozenset().union(*cases)
    chosen = set()
    while missing:
        best = max(range(len(cases)), key=lambda n: (len(cases[n] & missing), -n))
        chosen.add(best)
        missing -= cases[best]
    return chosen


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    close_pool()
