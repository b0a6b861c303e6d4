"""Runs the cases of all modules of this folder; see its docstring."""

from __future__ import annotations

import importlib
import pkgutil
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch.distributed.checkpoint import CheckpointException

from tests.storage.attacks.case import Attack, Gives, Refused
from tests.storage.conftest import Place
from tests.storage.states import assert_same

pytestmark = pytest.mark.filterwarnings("ignore")  # DCP warns that there is no process group


def _cases() -> Iterator[object]:
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if module.name not in ("case", "test_attacks"):
            found = importlib.import_module(f"tests.storage.attacks.{module.name}")
            for case in getattr(found, "CASES", ()):
                for kind in case.on:
                    yield pytest.param(case, kind, id=f"{module.name}: {case.name} ({kind})")


def _raised(case: Attack, place: Place) -> BaseException | None:
    try:
        found = case.attack(place)
    except Exception as error:
        if isinstance(case.must, Gives):
            raise
        return error
    except CheckpointException as error:  # a BaseException
        if isinstance(case.must, Gives):
            raise
        return error
    if isinstance(case.must, Gives):
        assert_same(found, case.must.value)
    return None


def _is_refusal(error: BaseException, must: Refused) -> bool:
    if isinstance(error, CheckpointException):
        return all(_is_refusal(failure[0], must) for failure in error.failures.values())
    quoted = isinstance(error, AssertionError) and "metadata read failed: " in str(error)
    text = f"{type(error).__name__}: {error}"
    return (isinstance(error, must.error) or quoted) and bool(re.search(must.match, text))


@pytest.mark.each_value
@pytest.mark.parametrize(("case", "kind"), list(_cases()))
def test_attack(case: Attack, kind: str, make_place: Callable[[str], Place]) -> None:
    place = make_place(kind)
    begin = time.monotonic()
    error = _raised(case, place)
    assert time.monotonic() - begin < case.seconds
    if isinstance(case.must, Refused):
        assert error is not None, "it went through"
        assert _is_refusal(error, case.must), repr(error)
