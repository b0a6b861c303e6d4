"""The background process of ``AsyncCheckpointerType.PROCESS`` is killed: the next save works again.

torch keeps the dead process for good; :func:`recover_async_process` replaces it, on all ranks.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dcp_fsdp_osd import FlatStager, StreamingReader, StreamingWriter, latest, recover_async_process
from tests.ranks import run_ranks
from tests.staging.processes import background, kill
from tests.torch_gaps import HAS_STAGERS, async_save, lacks

pytestmark = [
    pytest.mark.slow,  # processes are spawned, which import torch
    lacks(not HAS_STAGERS, "dcp.async_save(async_stager=...)"),
]

_NUMEL = 1 << 20


class _Saver:
    """Saves by process; each writes its number."""

    def __init__(self, path: str, stager: FlatStager | None) -> None:
        self.path, self.stager, self.number = path, stager, 0
        self.group = dist.new_group(backend="gloo")
        self.saved: list[int] = []

    def start(self, kind: str = "process") -> Any:
        self.number += 1
        options = {} if self.stager is None or kind == "thread" else {"async_stager": self.stager}
        state = {f"w{rank}": torch.full((_NUMEL,), float(self.number)) for rank in range(4)}
        return async_save(
            state,
            kind=kind,
            storage_writer=StreamingWriter(f"{self.path}/step-{self.number}", fsync=False),
            process_group=self.group,
            **options,
        )

    def save(self, kind: str = "process") -> None:
        self.start(kind).result(timeout=200)
        self.saved.append(self.number)

    def wait(self, future: Any) -> None:
        """Of a save whose process may have been killed: an error, or a checkpoint."""
        with contextlib.suppress(OSError, EOFError, RuntimeError, dcp.api.CheckpointException):
            future.result(timeout=200)

    def check(self) -> None:
        dist.barrier()
        newest = latest(self.path)
        assert newest is not None and newest.endswith(f"step-{self.saved[-1]}"), newest
        for number in self.saved:
            state = {"w1": torch.zeros(_NUMEL)}
            dcp.load(state, storage_reader=StreamingReader(f"{self.path}/step-{number}"))
            assert bool((state["w1"] == number).all())


def _killed(rank: int, world: int, path: str, victims: list[int]) -> None:
    saver = _Saver(path, FlatStager(shared_memory=True))
    saver.save()
    (process,) = background()

    def strike() -> None:
        if rank in victims:
            kill(background())

    # While idle: only its own rank could know.
    dist.barrier()
    strike()
    dist.barrier()
    saver.save()
    assert process not in background(), "all are new: the others have lost a peer"
    # As soon as it is sent what it shall save.
    under_way = saver.start()
    strike()
    dist.barrier()  # the error of the others may be long in coming: the next save ends the wait
    saver.save()
    saver.wait(under_way)
    # In the middle of a write.
    under_way = saver.start()
    _await_file(Path(path) / f"step-{saver.number}")
    strike()
    saver.save()
    saver.wait(under_way)
    if world == 1:  # While the next one starts; others would wait for it, in torch, half an hour.
        strike()
        under_way = saver.start()
        end = time.monotonic() + 60
        while not background() and time.monotonic() < end:
            time.sleep(0.01)
        strike()
        saver.wait(under_way)
        saver.save()
    saver.save("thread")
    saver.check()


def _await_file(folder: Path) -> None:
    end = time.monotonic() + 20
    while not folder.exists() or not any(folder.iterdir()):
        assert time.monotonic() < end, "nothing was written"
        time.sleep(0.001)


@pytest.mark.parametrize(("world", "victims"), [(1, [0]), (2, [0]), (3, [1])])
def test_the_next_save_works_again(tmp_path: Path, world: int, victims: list[int]) -> None:
    run_ranks(_killed, world, str(tmp_path), victims, timeout=500)


def _by_hand(rank: int, world: int, path: str) -> None:
    saver = _Saver(path, None)
    assert not recover_async_process(saver.group), "none has been started"
    saver.save()
    assert not recover_async_process(saver.group)
    old = background()
    dist.barrier()
    if rank == 1:
        kill(old)
    dist.barrier()
    if rank == 1:  # what torch does by itself
        for _ in range(2):
            with pytest.raises((OSError, EOFError)):
                saver.start().result(timeout=60)
    assert recover_async_process(saver.group)
    assert not background()
    saver.number = 10
    saver.save()
    assert not {*background()} & {*old}
    saver.check()


def test_with_another_stager_by_hand(tmp_path: Path) -> None:
    run_ranks(_by_hand, 2, str(tmp_path), timeout=300)


def test_no_process_outlives_its_job(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    jobs = {}
    for way in ("exits", "killed"):
        (tmp_path / way).mkdir()
        jobs[way] = subprocess.Popen(
            [sys.executable, "-m", "tests.staging.exits", str(tmp_path / way), way],
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(root)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    for way, job in jobs.items():
        out, errors = job.communicate(timeout=500)
        assert job.returncode == (0 if way == "exits" else -9), errors[-3000:]
        pids = [int(pid) for pid in out.split()]
        assert len(pids) == 2
        end = time.monotonic() + 60
        while any(_lives(pid) for pid in pids):
            assert time.monotonic() < end, f"{way}: {pids} live on"
            time.sleep(0.05)
        assert not [*Path("/dev/shm").glob(f"torch_{job.pid}_*")]
        newest = latest(tmp_path / way)
        assert newest is not None and newest[-1] in ("3" if way == "exits" else "23")
        state = {"w": torch.zeros(4 << 20)}
        dcp.load(state, storage_reader=StreamingReader(newest), no_dist=True)
        assert bool((state["w"] == float(newest[-1])).all())


def _lives(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
