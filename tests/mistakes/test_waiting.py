"""When the log does not name ranks: nothing is waited for, or all are there."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

from dcp_fsdp_osd import FlatOptimSavePlanner, StreamingWriter
from dcp_fsdp_osd.misuse import waiting
from tests.mistakes.alone import soon
from tests.mistakes.case import heard
from tests.planners.checks import make
from tests.ranks import run_ranks


def _threads() -> list[str]:
    return [t.name for t in threading.enumerate() if "waiting" in t.name]


def _save(path: str, **state: Any) -> None:
    dcp.save(state, storage_writer=StreamingWriter(path, overwrite=True))


def _quiet(rank: int, world: int, path: str) -> tuple[list[str], list[str]]:
    told: list[str] = []
    planner = FlatOptimSavePlanner(*make(steps=0))
    with heard(told), soon():
        _save(f"{path}/a", x=torch.ones(3))
        with contextlib.suppress(dcp.api.CheckpointException):  # an error ends the wait too
            dcp.save({"no": 1}, storage_writer=FileSystemWriter(f"{path}/b"), planner=planner)
        try:
            dcp.save({"no": 1}, storage_writer=FileSystemWriter(f"{path}/b"), planner=planner)
        except dcp.api.CheckpointException:
            if rank == 0:  # its traceback holds the plan, and rank 1 has gone on
                time.sleep(1.2)
    time.sleep(0.2)
    return told, _threads()


def test_nothing_is_said_and_no_thread_stays(tmp_path: Path) -> None:
    assert run_ranks(_quiet, 2, str(tmp_path)) == [([], [])] * 2


class Slow(FlatOptimSavePlanner):
    """Plans for longer than anybody waits quietly."""

    def create_global_plan(self, all_plans: Any) -> Any:
        time.sleep(2.5)
        return super().create_global_plan(all_plans)


def _late(rank: int, world: int, path: str) -> list[str]:
    told: list[str] = []
    model, optim = make()
    with heard(told), soon(0.4):
        planner = Slow(model, optim)
        dcp.save(
            {"optim": optim.state_dict()}, storage_writer=FileSystemWriter(path), planner=planner
        )
    return told


def test_ranks_that_wait_together_miss_nobody(tmp_path: Path) -> None:
    assert run_ranks(_late, 3, str(tmp_path)) == [[]] * 3


def _one_of_four(rank: int, world: int, path: str) -> list[str]:
    told: list[str] = []
    with heard(told), soon(0.4):
        if rank == 2:
            time.sleep(2.5)
        _save(path, x=torch.ones(3))
    return told


def test_the_one_that_is_late_is_named(tmp_path: Path) -> None:
    told = run_ranks(_one_of_four, 4, str(tmp_path))
    assert any("Not heard of: 2, of 4." in line for lines in told for line in lines)
    assert told[2] == []
    assert sum(map(bool, told)) < 3  # one tells it for all that wait


def test_one_process_waits_for_nobody() -> None:
    before = threading.active_count()
    plan = waiting.watched(dcp.SavePlan([]), "save")
    assert plan is not None and threading.active_count() == before
