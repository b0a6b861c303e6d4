"""One rank of ``benchmarks.repeated_saves --real``: real saves, and what of them is not writing."""

from __future__ import annotations

import collections
import functools
import time
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmarks.launch import report
from benchmarks.nothing import NoPlanner, NoWriter
from benchmarks.repeated_saves import Rank, llama
from dcp_fsdp_osd import StreamingWriter
from dcp_fsdp_osd.layout import simulate


@dataclass(frozen=True)
class Job:
    """What all ranks do: ``saves`` saves into folders below ``path``."""

    path: str
    saves: int
    flat: bool


_STEPS = (
    "set_up_planner",
    "create_local_plan",
    "create_global_plan",
    "finish_plan",
    "prepare_local_plan",
    "prepare_global_plan",
    "write_data",
    "finish",
)


def _clocked(owner: Any, spent: dict[str, float]) -> Any:
    """``owner``, whose methods add their thread's CPU seconds to ``spent``; of its own class."""
    for name in _STEPS:
        method = getattr(type(owner), name, None)
        if method is not None:
            setattr(owner, name, _timed(method.__get__(owner), name, spent))
    return owner


def _timed(method: Any, name: str, spent: dict[str, float]) -> Any:
    @functools.wraps(method)  # DCP looks at its signature
    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.thread_time()
        try:
            return method(*args, **kwargs)
        finally:
            spent[f"cpu {name}"] += time.thread_time() - start

    return call


def _run(job: Job) -> list[dict[str, float]]:
    rank = Rank(simulate(llama(job.flat), world_size=dist.get_world_size(), rank=dist.get_rank()))
    spent: dict[str, float] = collections.defaultdict(float)
    _clocked(rank.planner, spent)
    found: list[dict[str, float]] = []
    for step in range(1, job.saves + 1):
        state: dict[str, Any] = rank.state(step)
        writer = _clocked(StreamingWriter(f"{job.path}/step-{step}", fsync=False), spent)
        dist.barrier()
        start, began = time.perf_counter(), time.thread_time()
        dcp.save({}, storage_writer=NoWriter(), planner=NoPlanner())
        floor, of_nothing = time.perf_counter() - start, time.thread_time() - began
        dist.barrier()
        spent.clear()
        start, began = time.perf_counter(), time.thread_time()
        dcp.save(state, storage_writer=writer, planner=rank.planner)
        whole = time.perf_counter() - start
        spent["cpu whole"] = time.thread_time() - began
        spent["cpu floor"] = of_nothing
        spent["cpu finish"] += 0.0  # the coordinator's alone
        seconds = writer.stats.seconds
        timed = {"whole": whole, "floor": floor, "write": seconds["write"]}
        found.append({**timed, **_commit(seconds), **spent})
    return found


def _commit(seconds: dict[str, float]) -> dict[str, float]:
    """The coordinator's alone; all wait for it."""
    names = ("metadata", "commit")
    return {name: seconds[name] for name in names if name in seconds}


if __name__ == "__main__":
    report(_run)
