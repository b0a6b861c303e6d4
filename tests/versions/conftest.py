"""Which interpreters the checkpoints of this one are exchanged with."""

from __future__ import annotations

import sys

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--other-python",
        action="append",
        help="an interpreter with another torch, with which checkpoints are exchanged both ways; "
        "may be given several times (default: this interpreter)",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "other_python" in metafunc.fixturenames:
        others = metafunc.config.getoption("--other-python", default=None)
        # This interpreter's own checkpoints are the matter of all other tests.
        itself = pytest.param(sys.executable, marks=pytest.mark.slow)
        metafunc.parametrize("other_python", others or [itself])
