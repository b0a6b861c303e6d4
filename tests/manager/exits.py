"""Ranks that end while a save is under way: ``python -m tests.manager.exits FOLDER``.

Two ranks for each way to end, forked from this process, so that torch is imported once and each
ends as a Python program does.  Prints a line of JSON: way -> exit code and seconds of each rank.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dcp_fsdp_osd import CheckpointManager
from tests.storage.fakes import Script

WAYS = ("exit", "error", "one exits", "destroy", "destroy and stay", "close", "sigterm")
LIMIT = 100.0
"""Seconds; who waits for a rank that will not come waits for half an hour."""


def state(step: int) -> dict[str, Any]:
    return {f"w{i}": torch.arange(50_000) * (step + 1) + i for i in range(4)}


def _end(rank: int, way: str, folder: str) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=20),
    )
    slow = Script(before=lambda operation, name: time.sleep(0.05))
    manager = CheckpointManager(f"{folder}/run", backend=slow.store, preempt_signals=())
    manager.save(1, state(1), wait=True)
    manager.save(2, state(2))
    if way == "exit" or (way == "one exits" and rank == 1):
        sys.exit(3)
    if way == "error":
        raise RuntimeError("of the user")
    if way.startswith("destroy"):
        time.sleep(0.15 * rank)
        dist.destroy_process_group()
        if way == "destroy and stay" and rank == 0:
            time.sleep(6)
    if way == "close":
        with manager:
            raise RuntimeError("of the user")
    if way == "sigterm":
        os.kill(os.getpid(), signal.SIGTERM)
    if way == "one exits":
        time.sleep(2)
    sys.exit(4)


def _start(way: str, folder: str) -> list[int]:
    """The processes of both ranks."""
    children: list[int] = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            try:
                _end(rank, way, folder)
            except RuntimeError:  # as at the top of a program, and not in this function's caller
                traceback.print_exc()
                sys.exit(1)
        children.append(child)
    return children


def _watch(children: list[int]) -> dict[int, tuple[int | None, float]]:
    """Exit code (None: killed at the limit) and seconds of each."""
    begin = time.monotonic()
    ended: dict[int, tuple[int | None, float]] = {}
    while len(ended) < len(children):
        for child in children:
            if child not in ended:
                late = time.monotonic() - begin > LIMIT
                if late:
                    os.kill(child, signal.SIGKILL)
                found, status = os.waitpid(child, 0 if late else os.WNOHANG)
                if found:
                    code = None if late else os.waitstatus_to_exitcode(status)
                    ended[child] = code, time.monotonic() - begin
        time.sleep(0.02)
    return ended


if __name__ == "__main__":
    torch.set_num_threads(1)
    with CheckpointManager(f"{sys.argv[1]}/warm", preempt_signals=()) as warm:
        warm.save(0, state(0))  # what is imported at first use is imported once
    gc.collect()
    gc.freeze()  # what importing made is not looked through whenever a process ends
    started = {}
    for number, name in enumerate(WAYS):
        where = Path(sys.argv[1]) / str(number)
        where.mkdir()
        started[name] = _start(name, str(where))
    ended = _watch([child for children in started.values() for child in children])
    print(json.dumps({name: [ended[c] for c in children] for name, children in started.items()}))
