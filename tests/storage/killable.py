"""Ranks that a test can kill: each saves or loads once, reports, and ends.

They are forked from a server that has imported torch once, so one costs milliseconds.  A
:class:`Crew` never outlives its block, nor ``limit`` seconds.

State of version v: every value is computed from v and its name, so whoever loads can tell which
version it has got, whole or mixed.  Each rank owns tensors of its own, and all have the version.
"""

from __future__ import annotations

import contextlib
import datetime
import random
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import connection, get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dcp_fsdp_osd.storage import StreamingReader, StreamingWriter
from dcp_fsdp_osd.storage.transfer import RetryPolicy

__all__ = [
    "GROUP_TIMEOUT",
    "SURVIVORS_END_WITHIN",
    "Crew",
    "Outcome",
    "Task",
    "calibrate",
    "check_version",
    "load_alone",
    "moments",
    "state_of",
    "writer",
]

GROUP_TIMEOUT = 8.0
"""Time limit of a collective, seconds."""
RETRY = RetryPolicy(tries=4, seconds=4.0, longest=1.0)
SURVIVORS_END_WITHIN = 25.0
"""The stated limit: a survivor is in storage calls (a stall, and retries that began before it) or
waits for the dead in a collective, hardly both; seconds."""

_context = get_context("forkserver")
_context.set_forkserver_preload(
    ["torch", "torch.distributed.checkpoint", "boto3", "s3fs", "tests.storage.killable"]
)


@dataclass(frozen=True)
class Task:
    """What all ranks of a crew do: ``kind`` is "save" or "load"."""

    kind: str
    url: str
    version: int
    options: dict[str, Any] = field(default_factory=dict)
    overwrite: bool = False
    kib: int = 2048
    ranks: int = 2
    stall: float = 4.0


def state_of(version: int, rank: int | None, task: Task) -> dict[str, Any]:
    """The state of one rank, or of all ranks for None."""
    state: dict[str, Any] = {"version": torch.tensor(version), "label": f"version {version}"}
    for each in range(task.ranks) if rank is None else [rank]:
        for part in range(4):
            values = torch.arange(task.kib * 64, dtype=torch.int32)
            state[f"rank{each}.w{part}"] = values.mul_(2 * version + 1).add_(each * 4 + part)
        for part in range(8):
            state[f"rank{each}.step{part}"] = torch.tensor(float(100 * version + part))
    return state


def check_version(state: dict[str, Any], version: int, task: Task) -> None:
    """Raise AssertionError where ``state`` is not ``version`` to the bit."""
    for name, expected in state_of(version, None, task).items():
        found = state[name]
        same = torch.equal(found, expected) if torch.is_tensor(expected) else found == expected
        assert same, f"{name} is not of version {version}"


def load_alone(task: Task) -> dict[str, Any]:
    """The whole state at ``task.url``, read by this process without a process group."""
    state = state_of(-1, None, task)
    dcp.load(state, storage_reader=_reader(task), no_dist=True)
    return state


def _reader(task: Task) -> StreamingReader:
    return StreamingReader(task.url, stall_seconds=task.stall, retry=RETRY, **task.options)


def writer(task: Task) -> StreamingWriter:
    return StreamingWriter(
        task.url, overwrite=task.overwrite, stall_seconds=task.stall, retry=RETRY, **task.options
    )


def _rank_main(rank: int, task: Task, rendezvous: str, parent: connection.Connection) -> None:
    """Body of a rank.  Says "ready", waits for a word, reports (see :class:`Outcome`), and ends."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=task.ranks,
        timeout=datetime.timedelta(seconds=GROUP_TIMEOUT),
    )
    saved = state_of(task.version, rank, task)
    loaded = state_of(-1, None, task)
    dist.barrier()
    parent.send("ready")
    parent.recv()
    begin = time.monotonic()
    try:
        if task.kind == "save":
            dcp.save(saved, storage_writer=writer(task))
        else:
            dcp.load(loaded, storage_reader=_reader(task))
            check_version(loaded, task.version, task)
        parent.send(("done", "", time.monotonic() - begin))
    except BaseException:
        parent.send(("raised", traceback.format_exc(), time.monotonic() - begin))
    # No destroy_process_group, which would wait for the dead; but the interpreter ends as usual,
    # so a thread that hangs is found out.


@dataclass
class Outcome:
    """How a rank ended: what it reported (None: nothing), and its exit code.

    A report is ("done" or "raised", the traceback, seconds in the storage calls).
    """

    report: tuple[str, str, float] | None
    exitcode: int | None


class Crew:
    """The ranks of one task.  Use as a context manager; :meth:`go` starts the clock."""

    def __init__(self, task: Task, *, limit: float = 60.0) -> None:
        self.task = task
        self.deadline = time.monotonic() + limit
        self._folder = tempfile.TemporaryDirectory(prefix="crew-")
        self.ranks: list[ForkServerProcess] = []
        # Pipes, as multiprocessing's events wait for the dead.
        self._pipes: list[connection.Connection] = []

    def __enter__(self) -> Crew:
        for rank in range(self.task.ranks):
            ours, theirs = _context.Pipe()
            rendezvous = str(Path(self._folder.name) / "rendezvous")
            process = _context.Process(
                target=_rank_main, args=(rank, self.task, rendezvous, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self.ranks.append(process)
            self._pipes.append(ours)
        for pipe in self._pipes:
            if not pipe.poll(max(0.0, self.deadline - time.monotonic())):
                self.__exit__()
                raise RuntimeError("the ranks did not get ready")
            pipe.recv()
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self.ranks:
            process.kill()
            process.join(10)
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()

    def go(self) -> None:
        """Let the ranks begin; those that are dead already miss it."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send("go")

    def kill(self, rank: int) -> None:
        """SIGKILL."""
        self.ranks[rank].kill()

    def outcomes(self, within: float) -> list[Outcome]:
        """Wait until every rank's process has ended; AssertionError after ``within`` seconds."""
        end = min(self.deadline, time.monotonic() + within)
        outcomes = []
        for rank, (process, pipe) in enumerate(zip(self.ranks, self._pipes, strict=True)):
            report = None
            with contextlib.suppress(EOFError, OSError):
                if pipe.poll(max(0.0, end - time.monotonic())):
                    report = pipe.recv()
            process.join(max(0.0, end - time.monotonic()))
            if process.exitcode is None:
                raise AssertionError(
                    f"rank {rank} has not ended within {within} s; it said {report}"
                )
            outcomes.append(Outcome(report, process.exitcode))
        return outcomes


def calibrate(task: Task) -> float:
    """Seconds that the task takes undisturbed; all ranks must be done."""
    with Crew(task) as crew:
        crew.go()
        outcomes = crew.outcomes(60.0)
    for outcome in outcomes:
        assert outcome.report is not None and outcome.report[0] == "done", outcome
    return max(outcome.report[2] for outcome in outcomes if outcome.report is not None)


def moments(seed: str, count: int) -> Iterator[tuple[float, int]]:
    """(fraction of the task's time, rank to kill), seeded; a few lie after the end."""
    chosen = random.Random(seed)
    for _ in range(count):
        yield chosen.uniform(0.0, 1.1), chosen.randrange(2)
