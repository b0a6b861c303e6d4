"""The background process of ``AsyncCheckpointerType.PROCESS`` is killed: what later saves are told.

torch keeps the dead process for good; a save on a thread needs none.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dcp_fsdp_osd import StreamingReader, StreamingWriter
from dcp_fsdp_osd.storage import latest
from tests.ranks import run_ranks
from tests.torch_gaps import HAS_STAGERS, async_save, lacks


def _background() -> list[int]:
    """Processes that were spawned, rather than forked, by this one."""
    children = [
        int(pid)
        for task in Path("/proc/self/task").iterdir()
        for pid in (task / "children").read_text().split()
    ]
    return [pid for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def _kill_between_and_during(rank: int, world: int, path: str) -> None:
    group = dist.new_group(backend="gloo")

    def save(number: int, kind: str) -> Any:
        return async_save(
            {"w": torch.full((1 << 20,), float(number))},
            kind=kind,
            storage_writer=StreamingWriter(f"{path}/step-{number}", fsync=False),
            process_group=group,
        )

    save(1, "process").result()
    under_way = save(2, "process")
    time.sleep(0.02 * rank)
    for pid in _background():
        os.kill(pid, signal.SIGKILL)
    try:
        under_way.result()
    except BaseException as error:
        assert not isinstance(error, TimeoutError), error
    begin = time.monotonic()
    with pytest.raises((OSError, EOFError)):
        save(3, "process").result()
    assert time.monotonic() - begin < 10
    dist.barrier()
    save(4, "thread").result()
    newest = latest(path)
    assert newest is not None and newest.endswith("step-4")
    for number in (1, 4):
        state = {"w": torch.zeros(1 << 20)}
        dcp.load(state, storage_reader=StreamingReader(f"{path}/step-{number}"))
        assert bool((state["w"] == number).all())


@pytest.mark.slow  # a process is spawned, which imports torch
@lacks(not HAS_STAGERS, "dcp.async_save(async_stager=...)")
@pytest.mark.parametrize("world", [1, 2])
def test_later_saves_fail_at_once_and_threads_go_on(tmp_path: Path, world: int) -> None:
    run_ranks(_kill_between_and_during, world, str(tmp_path), timeout=90)
