"""One rank of ``benchmarks.repeated_saves --real``: real saves, and what of them is not writing."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmarks.launch import report
from benchmarks.repeated_saves import Rank, llama
from dcp_fsdp_osd import StreamingWriter
from dcp_fsdp_osd.layout import simulate


@dataclass(frozen=True)
class Job:
    """What all ranks do: ``saves`` saves into folders below ``path``."""

    path: str
    saves: int
    flat: bool


def _run(job: Job) -> list[dict[str, float]]:
    rank = Rank(simulate(llama(job.flat), world_size=dist.get_world_size(), rank=dist.get_rank()))
    found: list[dict[str, float]] = []
    for step in range(1, job.saves + 1):
        state: dict[str, Any] = rank.state(step)
        writer = StreamingWriter(f"{job.path}/step-{step}", fsync=False)
        dist.barrier()
        start = time.perf_counter()
        dcp.save(state, storage_writer=writer, planner=rank.planner)
        whole = time.perf_counter() - start
        seconds = writer.stats.seconds
        found.append({"whole": whole, "write": seconds["write"], **_commit(seconds)})
    return found


def _commit(seconds: dict[str, float]) -> dict[str, float]:
    """The coordinator's alone; all wait for it."""
    names = ("metadata", "commit")
    return {name: seconds[name] for name in names if name in seconds}


if __name__ == "__main__":
    report(_run)
