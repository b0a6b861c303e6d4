"""One planner, two threads: at whatever step the second comes in, one of the two is refused, and
the other one's plan and values are its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan
from torch.distributed.checkpoint.state_dict_saver import save

from dcp_fsdp_osd import (
    CheckpointMismatchError,
    FlatOptimLoadPlanner,
    FlatOptimSavePlanner,
    LayoutError,
    StreamingReader,
    StreamingWriter,
)

REFUSED = r"one save or load at a time, found that another thread"


def _state(value: float) -> dict[str, Any]:
    return {"weight": torch.full((4,), value)}


class _Slow(dict[str, Any]):
    """A state dict that is read only when it is `told` to."""

    def __init__(self, state: dict[str, Any]) -> None:
        super().__init__(state)
        self.asked, self.told = threading.Event(), threading.Event()

    def items(self) -> Any:
        self.asked.set()
        assert self.told.wait(30)
        return super().items()


class _Saving:
    """A save as DCP makes it, step by step."""

    bad: ClassVar = {"weight": torch.empty(4, device="meta")}

    def __init__(self) -> None:
        self.planner = FlatOptimSavePlanner()

    def set_up(self, state: dict[str, Any]) -> None:
        self.planner.set_up_planner(state, None, is_coordinator=True)

    def plan(self) -> SavePlan:
        local = self.planner.create_local_plan()
        (answer,), _ = self.planner.create_global_plan([local])
        return answer

    def value(self, answer: SavePlan) -> torch.Tensor:
        (item,) = self.planner.finish_plan(answer).items
        found: torch.Tensor = self.planner.resolve_data(item)
        return found


class _Loading:
    bad: ClassVar = {"weight": torch.empty(5)}

    def __init__(self, path: Path) -> None:
        save(_state(0.0), storage_writer=StreamingWriter(path), planner=FlatOptimSavePlanner())
        self.metadata = StreamingReader(path).read_metadata()
        self.planner = FlatOptimLoadPlanner()

    def set_up(self, state: dict[str, Any]) -> None:
        self.planner.set_up_planner(state, self.metadata, is_coordinator=True)

    def plan(self) -> LoadPlan:
        (answer,) = self.planner.create_global_plan([self.planner.create_local_plan()])
        return answer

    def value(self, answer: LoadPlan) -> torch.Tensor:
        (item,) = self.planner.finish_plan(answer).items
        return self.planner.resolve_tensor(item)


@pytest.fixture(params=["save", "load"])
def steps(request: pytest.FixtureRequest, tmp_path: Path) -> _Saving | _Loading:
    return _Saving() if request.param == "save" else _Loading(tmp_path / "checkpoint")


@pytest.fixture
def other() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def test_while_the_first_is_set_up(steps: Any, other: ThreadPoolExecutor) -> None:
    first = _Slow(_state(1.0))
    set_up = other.submit(steps.set_up, first)
    assert first.asked.wait(30)
    with pytest.raises(LayoutError, match=REFUSED):
        steps.set_up(_state(2.0))
    first.told.set()
    set_up.result(30)
    answer = other.submit(steps.plan).result(30)
    assert (other.submit(steps.value, answer).result(30) == 1.0).all()


def test_between_set_up_and_plan(steps: Any, other: ThreadPoolExecutor) -> None:
    steps.set_up(_state(1.0))
    other.submit(steps.set_up, _state(2.0)).result(30)
    with pytest.raises(LayoutError, match=REFUSED):
        steps.plan()
    answer = other.submit(steps.plan).result(30)
    with pytest.raises(LayoutError, match=REFUSED):
        steps.value(answer)
    assert (other.submit(steps.value, answer).result(30) == 2.0).all()


def test_between_plan_and_writing_or_reading(steps: Any, other: ThreadPoolExecutor) -> None:
    steps.set_up(_state(1.0))
    answer = steps.plan()  # the local plan is gone, as where DCP has sent it
    steps_of_other = other.submit(steps.set_up, _state(2.0))
    if steps_of_other.exception(30) is None:
        with pytest.raises(LayoutError, match=REFUSED):
            steps.value(answer)
        answer = other.submit(steps.plan).result(30)
        assert (other.submit(steps.value, answer).result(30) == 2.0).all()
    else:
        assert (steps.value(answer) == 1.0).all()


def test_one_after_the_other_and_after_one_that_failed(
    steps: Any, other: ThreadPoolExecutor
) -> None:
    with pytest.raises((LayoutError, CheckpointMismatchError, ValueError)):
        steps.set_up(steps.bad)
        steps.plan()
    for value in (1.0, 2.0):
        other.submit(steps.set_up, _state(value)).result(30)
        answer = other.submit(steps.plan).result(30)
        assert (other.submit(steps.value, answer).result(30) == value).all()
        del answer
    steps.set_up(_state(3.0))
    assert (steps.value(steps.plan()) == 3.0).all()
