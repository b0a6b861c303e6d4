"""Many asynchronous saves in one process: nothing that they used is left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
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
)
from tests.models import Mlp, adamw, train_steps, wrap_fsdp1
from tests.ranks import run_ranks
from tests.torch_gaps import HAS_STAGERS, async_save, lacks

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

_SLACK = 8 << 20


def _used() -> tuple[int, int, int, int]:
    """Resident bytes, handles, threads, and maps of shared memory of this process."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    handles = len(list(Path("/proc/self/fd").iterdir()))
    shared = sum("/dev/shm" in line for line in Path("/proc/self/maps").read_text().splitlines())
    return resident, handles, threading.active_count(), shared


def _children() -> set[int]:
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        found.update(map(int, (task / "children").read_text().split()))
    return found


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


def _by_process(rank: int, world: int, folder: str, saves: int) -> list[tuple[int, ...]]:
    group = dist.new_group(backend="gloo")
    model = wrap_fsdp1(Mlp())
    optim = adamw(model)
    state = {"model": FlatModelState(model), "optim": FlatOptimState(model, optim)}
    stager = FlatStager(shared_memory=True)
    before = _children()

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
        save(number).result()
        if number in (5, saves - 1):
            used.append(_used())
    assert len(stager._blocks) == 1
    # A background process that is killed is an error of the save, which leaves no checkpoint; torch
    # starts no other one.
    for pid in _children() - before:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for number in (saves, saves + 1):
        with pytest.raises((RuntimeError, OSError, EOFError)):
            save(number).result(timeout=60)
        assert not (Path(folder) / str(number) / ".metadata").exists()
    assert len(stager._blocks) == 1
    return used


@lacks(not HAS_STAGERS, "dcp.async_save(async_stager=...)")
def test_saves_by_a_process_that_is_killed(tmp_path: Path) -> None:
    (used,) = run_ranks(_by_process, 1, str(tmp_path), 100, timeout=300)
    print(used)
    _check(used)
