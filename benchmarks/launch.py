"""Starts a benchmark's ranks, each a process of its own, and collects what they report.

A module of ranks ends with::

    if __name__ == "__main__":
        report(run)  # run(job) returns this rank's result, as JSON can hold it

and is run by ``run_ranks("benchmarks.<module>", job, world, timeout)``.
"""

from __future__ import annotations

import datetime
import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["report", "run_ranks"]


def run_ranks(module: str, job: Any, world: int, timeout: float) -> list[Any]:
    """Each rank's result.  No rank is left, however it ends.

    Args:
        module: run as ``python -m``; it calls :func:`report`.
        job: what :func:`report` hands to each rank; pickled.
        timeout: seconds for all of it.

    Raises:
        RuntimeError: a rank failed, or the time is over.
    """
    folder = Path(tempfile.mkdtemp(prefix="ranks-"))
    (folder / "job").write_bytes(pickle.dumps(job))
    command = [sys.executable, "-W", "ignore", "-m", module, str(folder)]
    ranks = [
        subprocess.Popen([*command, str(rank), str(world)], cwd=Path(__file__).resolve().parents[1])
        for rank in range(world)
    ]
    deadline = time.monotonic() + timeout
    try:
        while any(rank.poll() is None for rank in ranks):
            if any(rank.poll() for rank in ranks) or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        codes = [rank.poll() for rank in ranks]
        if any(code != 0 for code in codes):
            raise RuntimeError(f"ranks ended with {codes} (None: not within {timeout:.0f} s)")
        return [json.loads((folder / f"result-{r}.json").read_text()) for r in range(world)]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        shutil.rmtree(folder, ignore_errors=True)


def report(run: Callable[[Any], Any]) -> None:
    """Be one rank: ``run`` the job in a gloo process group, leave its result, end the process."""
    import torch
    import torch.distributed as dist

    folder, rank, world = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    job = pickle.loads((Path(folder) / "job").read_bytes())
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=300),
    )
    try:
        result = run(job)
        (Path(folder) / f"result-{rank}.json").write_text(json.dumps(result))
        dist.barrier()
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # the other ranks wait in a collective: the parent ends them
    dist.destroy_process_group()
    os._exit(0)  # torch 2.13's FSDP1 on gloo now and then aborts in the interpreter's own exit
