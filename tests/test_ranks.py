"""The harness itself: results, errors of every rank, hangs, deaths, clean starts."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.ranks import GRACE, RankError, close_pool, mesh, run_ranks


def _sum(rank: int, world_size: int, factor: int) -> tuple[int, torch.Tensor]:
    total = torch.tensor([rank * factor])
    dist.all_reduce(total)
    return rank, total


def _fail_on(rank: int, world_size: int, bad: int) -> int:
    if rank == bad:
        raise KeyError(f"rank {rank} of {world_size}")
    return rank


def _fail_all(rank: int, world_size: int) -> None:
    try:
        raise OSError("disk")
    except OSError as error:
        raise CheckpointException("save", {rank: (error, None)}) from None  # type: ignore[dict-item]


class _Unpicklable(Exception):
    def __init__(self) -> None:
        super().__init__("has a lock")
        self.lock = threading.Lock()


def _fail_unpicklable(rank: int, world_size: int) -> None:
    raise _Unpicklable


def _unpicklable_result(rank: int, world_size: int) -> Any:
    return threading.Lock()


def _leave_others_waiting(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("on one rank alone")
    dist.barrier()


def _hang(rank: int, world_size: int, pid_file: str) -> None:
    if rank == 0:
        with subprocess.Popen(["sleep", "600"]) as child:
            Path(pid_file).write_text(f"{os.getpid()} {child.pid}")
            child.wait()


def _die(rank: int, world_size: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _pid(rank: int, world_size: int) -> int:
    return os.getpid()


def _leave_a_mess(rank: int, world_size: int) -> int:
    dist.new_group([0])
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)
    torch.manual_seed(rank + 7)
    return os.getpid()


def _leave_a_thread(rank: int, world_size: int) -> int:
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    return os.getpid()


def _look(rank: int, world_size: int) -> tuple[int, torch.dtype, int, float, int]:
    groups = dist.distributed_c10d._world.group_count
    state = (torch.get_default_dtype(), torch.get_num_threads(), torch.rand(()).item())
    return groups, *state, os.getpid()


def _alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def _gone(*pids: int, within: float = 10.0) -> bool:
    deadline = time.monotonic() + within
    while any(map(_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(_alive, pids))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_results_come_in_rank_order(world_size: int) -> None:
    results = run_ranks(_sum, world_size, 3)
    total = 3 * sum(range(world_size))
    assert [rank for rank, _ in results] == list(range(world_size))
    assert all(torch.equal(value, torch.tensor([total])) for _, value in results)


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_one_ranks_error_is_raised_with_its_traceback(bad: int) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(_fail_on, 3, bad)
    assert caught.value.types == {bad: "KeyError"}
    assert isinstance(caught.value.failures[bad].exception, KeyError)
    assert f"rank {bad} of 3" in str(caught.value)
    assert "in _fail_on" in str(caught.value)
    assert not caught.value.all_raised("KeyError")


def test_base_exceptions_of_all_ranks_are_raised() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(_fail_all, 2)
    assert caught.value.types == {0: "CheckpointException", 1: "CheckpointException"}
    assert caught.value.all_raised("OSError")
    assert not caught.value.all_raised("KeyError")


def test_errors_and_results_that_cannot_be_pickled() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(_fail_unpicklable, 2)
    assert caught.value.types == {0: "_Unpicklable", 1: "_Unpicklable"}
    assert caught.value.failures[0].exception is None
    assert "has a lock" in str(caught.value)
    with pytest.raises(RankError, match="cannot pickle"):
        run_ranks(_unpicklable_result, 2)


def test_a_rank_that_waits_for_a_failed_one_is_told() -> None:
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(_leave_others_waiting, 2)
    assert caught.value.types == {0: "RuntimeError", 1: "ValueError"}
    assert GRACE <= time.monotonic() - start < GRACE + 10
    assert run_ranks(_fail_on, 2, -1) == [0, 1]


_kept: list[object] = []


def _wait_in_a_chain(rank: int, world_size: int, dies: bool) -> None:
    groups = [dist.new_group([first, first + 1]) for first in range(world_size - 1)]
    if dies:
        _kept.extend(groups)
    if rank == 0:
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError
    dist.all_reduce(torch.ones(1), group=groups[rank - 1])


@pytest.mark.parametrize("dies", [False, True])
def test_ranks_that_wait_for_those_that_wait_for_a_failed_one_fail_too(dies: bool) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(_wait_in_a_chain, 3, dies, timeout=20)
    first = "Died" if dies else "ValueError"
    assert caught.value.types == {0: first, 1: "RuntimeError", 2: "RuntimeError"}


def test_a_hang_is_killed_within_the_limit_and_the_next_call_works(tmp_path: Path) -> None:
    pid_file = tmp_path / "pids"
    run_ranks(_pid, 2)
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(_hang, 2, str(pid_file), timeout=2)
    assert 2 <= time.monotonic() - start < 12
    assert caught.value.types == {0: "Hung"}
    assert "in _hang" in str(caught.value)
    worker, child = map(int, pid_file.read_text().split())
    assert _gone(worker, child)
    assert run_ranks(_fail_on, 2, -1) == [0, 1]


def test_a_dead_rank_is_noticed_at_once_and_the_next_call_works() -> None:
    before = run_ranks(_pid, 2)
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(_die, 2)
    assert time.monotonic() - start < GRACE + 10
    assert caught.value.failures[1].type == "Died"
    assert "-9" in caught.value.failures[1].message
    after = run_ranks(_pid, 2)
    assert not set(before) & set(after)
    assert _gone(*before)


def test_every_call_starts_clean_in_the_same_processes() -> None:
    first = run_ranks(_look, 2)
    pids = run_ranks(_leave_a_mess, 2)
    second = run_ranks(_look, 2)
    assert first == second
    assert [look[-1] for look in second] == pids


def test_workers_with_a_thread_left_behind_are_replaced() -> None:
    pids = run_ranks(_leave_a_thread, 2)
    assert not set(pids) & set(run_ranks(_pid, 2))
    assert _gone(*pids)


def test_the_same_processes_serve_every_world_size() -> None:
    close_pool()
    two = run_ranks(_pid, 2)
    four = run_ranks(_pid, 4)
    assert four[:2] == two
    assert run_ranks(_pid, 3) == four[:3]
    assert run_ranks(_pid, 1) == four[:1]
    with pytest.raises(RankError):
        run_ranks(_die, 2)
    assert not set(four) & set(run_ranks(_pid, 4))
    assert _gone(*four)


@pytest.mark.slow  # imports torch in two processes more
def test_workers_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    pid_file = tmp_path / "pids"
    program = f"""
        import os, pathlib, signal
        from tests.ranks import run_ranks
        from tests.test_ranks import _pid
        if __name__ == "__main__":
            pids = run_ranks(_pid, 2)
            pathlib.Path({str(pid_file)!r}).write_text(" ".join(map(str, pids)))
            os.kill(os.getpid(), signal.SIGKILL)
    """
    script = tmp_path / "orphans.py"
    script.write_text(textwrap.dedent(program))
    root = Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(root)},
        timeout=100,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    assert _gone(*map(int, pid_file.read_text().split()))


def test_functions_that_cannot_be_pickled_fail_in_the_caller() -> None:
    with pytest.raises((pickle.PicklingError, AttributeError)):
        run_ranks(lambda rank, world_size: None, 2)


def _redistribute(rank: int, world_size: int, size: int) -> int:
    placements: list[Any] = [Shard(0)]
    whole: torch.Tensor = distribute_tensor(
        torch.zeros(size), mesh(world_size), placements
    ).full_tensor()  # type: ignore[no-untyped-call]
    return whole.numel()


def _meshes(rank: int, world_size: int) -> int:
    return sum(isinstance(each, DeviceMesh) for each in gc.get_objects())


def test_no_mesh_of_an_earlier_call_is_kept() -> None:
    """What DTensor caches of it would keep its process groups, their threads and sockets."""
    for size in (2, 3):  # the first one imports, and what was there then is not seen later
        assert run_ranks(_redistribute, 2, size) == [size, size]
    assert run_ranks(_meshes, 2) == [0, 0]
