"""SIGKILL of a rank at random moments of a managed training run, again and again.

Each restart resumes from the newest committed step, to the bit; at the end nothing is left that
the last save should have removed.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
import time
from collections.abc import Iterator
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

from tests.manager.jobs import Run, digest
from tests.manager.killed import EVERY, KEEP_EVERY, KEEP_LAST, train
from tests.ranks import run_ranks

_context = get_context("forkserver")
_context.set_forkserver_preload(
    ["torch", "torch._dynamo", "torch.distributed.fsdp", "tests.manager.killed"]
)
SURVIVOR_ENDS_WITHIN = 30.0


@contextlib.contextmanager
def _ranks(folder: Path, last: int) -> Iterator[tuple[list[Any], list[connection.Connection]]]:
    with tempfile.TemporaryDirectory(prefix="killed-") as place:
        processes, pipes = [], []
        for rank in range(2):
            ours, theirs = _context.Pipe()
            arguments = (rank, str(folder), f"{place}/rendezvous", last, theirs)
            processes.append(_context.Process(target=train, args=arguments, daemon=False))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        try:
            yield processes, pipes
        finally:
            for process, pipe in zip(processes, pipes, strict=True):
                process.kill()
                process.join(10)
                pipe.close()


def _metadata(folder: Path) -> list[Path]:
    return list(folder.glob("step-*/.metadata"))


def _committed(folder: Path) -> list[int]:
    return sorted(int(path.parent.name[5:]) for path in _metadata(folder))


def _told(pipe: connection.Connection, until: float) -> list[tuple[Any, Any]]:
    """All that a rank says until it ends."""
    told = []
    with contextlib.suppress(EOFError, OSError):
        while pipe.poll(max(until - time.monotonic(), 0)):
            told.append(pipe.recv())
    return told


def _check_steps(told: list[tuple[Any, Any]], resumed: int | None, digests: dict[int, int]) -> int:
    """A rank resumed from where it should, and each step was as ever; the last one it did."""
    found = dict(told)
    if "resumed" in found:
        assert found["resumed"] == resumed
    steps = [(step, value) for step, value in told if isinstance(step, int)]
    for number, (step, value) in enumerate(steps):
        assert step == (resumed or 0) + number + 1
        assert digests.setdefault(step, value) == value, f"step {step} differs"
    return max((step for step, _ in steps), default=resumed or 0)


def _uninterrupted(rank: int, world: int, last: int) -> dict[int, int]:
    run, found = Run(seed=1), {}
    while run.step < last:
        run.train()
        found[run.step] = digest(run)
    return found


def _kill_again_and_again(folder: Path, kills: int, seed: int) -> dict[str, Any]:
    chosen = random.Random(seed)
    digests: list[dict[int, int]] = [{}, {}]
    figures: dict[str, Any] = {"kills": 0, "survivors ended after": [], "debris": 0, "redone": 0}
    reached = 0
    while figures["kills"] < kills:
        resumed = max(_committed(folder), default=None)
        figures["redone"] += reached - (resumed or 0)
        victim, delay = chosen.randrange(2), chosen.uniform(0.0, 1.5)
        with _ranks(folder, 1 << 30) as (processes, pipes):
            first = pipes[victim]
            assert first.poll(60), "the ranks did not get ready"
            told: list[list[Any]] = [[], []]
            told[victim].append(first.recv())
            end = time.monotonic() + delay
            while (left := end - time.monotonic()) > 0:
                for pipe in connection.wait(pipes, left):
                    which = pipes.index(pipe)  # type: ignore[arg-type]
                    told[which].append(pipes[which].recv())
            processes[victim].kill()
            killed = time.monotonic()
            for rank in (victim, 1 - victim):
                told[rank] += _told(pipes[rank], killed + SURVIVOR_ENDS_WITHIN)
            processes[1 - victim].join(max(killed + SURVIVOR_ENDS_WITHIN - time.monotonic(), 0))
            assert processes[1 - victim].exitcode is not None, "the survivor hangs"
            figures["survivors ended after"].append(time.monotonic() - killed)
            assert "raised" in dict(told[1 - victim]), told[1 - victim][-3:]
            reached = max(_check_steps(told[rank], resumed, digests[rank]) for rank in range(2))
        figures["kills"] += 1
        committed = _committed(folder)
        assert max(committed, default=0) >= (resumed or 0), "a committed checkpoint is gone"
        figures["debris"] += sum(
            1 for path in folder.glob("step-*") if not (path / ".metadata").exists()
        )
    last = max(_committed(folder), default=0) // EVERY * EVERY + 2 * EVERY
    resumed = max(_committed(folder), default=None)
    with _ranks(folder, last) as (_, pipes):
        for rank, pipe in enumerate(pipes):
            told = _told(pipe, time.monotonic() + 60)
            assert told[-1] == ("done", None), told[-1]
            assert _check_steps(told, resumed, digests[rank]) == last
    for rank, expected in enumerate(run_ranks(_uninterrupted, 2, last, timeout=300)):
        compared = {step: value for step, value in digests[rank].items() if step <= last}
        assert compared.items() <= expected.items()
    left = sorted(int(path.name[5:]) for path in folder.iterdir())
    every = range(KEEP_EVERY, last + 1, KEEP_EVERY)
    newest = range(last, max(last - KEEP_LAST * EVERY, 0), -EVERY)
    assert left == sorted({*every, *newest})
    for path in folder.iterdir():
        metadata = dcp.FileSystemReader(path).read_metadata()
        live = {info.relative_path for info in metadata.storage_data.values()}
        assert {name.name for name in path.iterdir()} == {".metadata", *live}, path
    figures["steps"] = last
    return figures


def _report(figures: dict[str, Any]) -> None:
    slowest = max(figures.pop("survivors ended after"))
    print(f"{figures}, the slowest survivor ended after {slowest:.1f} s")


def test_a_few_kills(tmp_path: Path) -> None:
    _report(_kill_again_and_again(tmp_path / "run", 3, seed=1))


@pytest.mark.slow
@pytest.mark.parametrize("kills", [50])
def test_many_kills(tmp_path: Path, kills: int) -> None:
    _report(_kill_again_and_again(tmp_path / "run", kills, seed=2))
