"""Many asynchronous saves in one process: nothing that they used is left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from dcp_fsdp_osd import (
    CheckpointManager,
    FlatModelState,
    FlatOptimSavePlanner,
    FlatOptimState,
    FlatStager,
    StreamingWriter,
    latest,
)
from tests.models import Mlp, adamw, train_steps, wrap_fsdp1
from tests.ranks import run_ranks
from tests.staging.processes import background, kill
from tests.torch_gaps import HAS_STAGERS, async_save, lacks

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

_SLACK = 8 << 20


def _used() -> tuple[int, ...]:
    """Resident bytes, handles, threads, maps of shared memory and child processes of this process,
    and files of torch in shared memory."""
    gc.collect()
    # A save's future is resolved on a thread of torch's, which ends a moment later.
    end = time.monotonic() + 10
    while time.monotonic() < end and any(
        each.name.startswith("ThreadPoolExecutor") for each in threading.enumerate()
    ):
        time.sleep(0.01)
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    handles = len(list(Path("/proc/self/fd").iterdir()))
    shared = sum("/dev/shm" in line for line in Path("/proc/self/maps").read_text().splitlines())
    files = len(list(Path("/dev/shm").glob(f"torch_{os.getpid()}_*")))
    return resident, handles, threading.active_count(), shared, len(background()), files


def _by_thread(rank: int, world: int, folder: str, saves: int) -> list[tuple[int, ...]]:
    model = wrap_fsdp1(Mlp())
    optim = adamw(model)
    state = {"model": FlatModelState(model), "optim": FlatOptimState(model, optim)}
    used = []
    options = {"fsync": False}
    with CheckpointManager(folder, preempt_signals=(), writer_options=options) as manager:
        for step in range(saves):
            train_steps(model, optim, 1, first=step)
            manager.save(step, state)
            if step in (5, saves - 1):
                manager.wait()
                used.append(_used())
    return used


def _check(used: list[tuple[int, ...]]) -> None:
    (memory, *others), (memory_later, *later) = used
    assert memory_later - memory < _SLACK, used
    assert later == others, used


def test_two_hundred_saves_beside_training(tmp_path: Path) -> None:
    for used in run_ranks(_by_thread, 2, str(tmp_path), 200, timeout=300):
        print(used)
        _check(used)


_KILLS = {10: "idle", 50: "begun", 90: "writing", 130: "idle", 170: "begun"}


def _by_process(rank: int, world: int, folder: str, saves: int) -> list[tuple[int, ...]]:
    group = dist.new_group(backend="gloo")
    model = wrap_fsdp1(Mlp())
    optim = adamw(model)
    state = {"model": FlatModelState(model), "optim": FlatOptimState(model, optim)}
    stager = FlatStager(shared_memory=True)

    def save(number: int) -> Any:
        return async_save(
            state,
            kind="process",
            storage_writer=StreamingWriter(f"{folder}/{number}", fsync=False),
            planner=FlatOptimSavePlanner(),
            process_group=group,
            async_stager=stager,
        )

    used = []
    for number in range(saves):
        train_steps(model, optim, 1, first=number)
        future, when = save(number), _KILLS.get(number)
        if when == "writing":
            while not (Path(folder) / str(number)).exists():
                time.sleep(0.001)
        if when is None:
            future.result()
        else:
            if when == "idle":
                future.result()
            kill(background())
            with contextlib.suppress(RuntimeError, OSError, EOFError):
                future.result(timeout=60)
        del future
        if number in (5, saves - 1):
            used.append(_used())
    assert len(stager._blocks) == 1
    assert latest(folder) == f"{folder}/{saves - 1}"
    return used


@lacks(not HAS_STAGERS, "dcp.async_save(async_stager=...)")
def test_two_hundred_saves_by_a_process_that_is_killed(tmp_path: Path) -> None:
    (used,) = run_ranks(_by_process, 1, str(tmp_path), 200, timeout=900)
    print(used)
    _check(used)
