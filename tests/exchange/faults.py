"""A load on three real ranks of which one fails; what the others, and their state, make of it."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import logging
import math
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import FileSystem

from dcp_fsdp_osd import (
    FlatOptimLoadPlanner,
    FlatOptimSavePlanner,
    StreamingReader,
    StreamingWriter,
)
from dcp_fsdp_osd.exchange.transport import Channels
from dcp_fsdp_osd.exchange.worker import Exchange
from dcp_fsdp_osd.load.optim import OptimLoad
from dcp_fsdp_osd.storage.transfer import RetryPolicy
from tests.models import Mlp, train_steps, wrap_fsdp1
from tests.planners.checks import OPTIMIZERS, raw
from tests.storage.fakes import Script

POINTS = ["planning", "opening", "reading", "allocating", "agreeing", "sending"]
KINDS = ["error", "unpicklable", "interrupt", "kill", "hang"]
READERS = ["stock", "streaming"]
WORLD, VICTIM = 3, 1
STALL = 3.0
"""``stall_seconds`` of planner and reader."""
JOB_TIMEOUT = 8.0
"""Time limit of the process group that loads: by then DCP's collectives end, whoever is dead."""
LIMIT = 75.0
"""Seconds for a whole case, start of the processes included."""
CAUSE = "the disk is on fire"


class Unpicklable(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


@dataclass
class Report:
    """What one rank saw.

    Attributes:
        error: class name of what ``dcp.load`` raised, or "" if it did not.
        text: its text, with those of the errors that it holds for ranks.
        log: what our package logged.
        seconds: from the fault to the error.
        untouched: the optimizer's state is what it was, to the bit.
        threads: names of threads of ours that are left.
    """

    error: str
    text: str
    log: str
    seconds: float
    untouched: bool
    threads: list[str]


class Fault:
    """What the victim does, once; notes when."""

    def __init__(self, kind: str, note: Path) -> None:
        self.kind, self._note, self._lock, self._done = kind, note, threading.Lock(), False

    def __call__(self) -> None:
        with self._lock:
            if self._done and self.kind not in ("error", "unpicklable"):
                return
            if not self._done:
                self._note.write_text(str(time.monotonic()))
            self._done = True
        if self.kind == "error":
            raise OSError(CAUSE)
        if self.kind == "unpicklable":
            raise Unpicklable(CAUSE)
        if self.kind == "interrupt":
            raise KeyboardInterrupt(CAUSE)
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1000)


def _nothing() -> None:
    pass


PLACES: dict[str, tuple[type, str]] = {
    "planning": (OptimLoad, "plan"),
    "allocating": (OptimLoad, "allocate"),
    "agreeing": (Exchange, "receive"),
    "sending": (Channels, "send"),
}
"""What fails at the points that lie in the planner and its exchange; in the victim's process."""


def strike(point: str, fault: Callable[[], None]) -> None:
    """Have each call that makes out ``point`` begin with ``fault``."""
    if point not in PLACES:
        return
    kind, name = PLACES[point]
    whole = getattr(kind, name)

    @functools.wraps(whole)
    def faulty(*args: Any, **kwargs: Any) -> Any:
        fault()
        return whole(*args, **kwargs)

    setattr(kind, name, faulty)


class _Stream(io.FileIO):
    """A file that fails at its third read."""

    fault, calls = staticmethod(_nothing), 0

    def _count(self) -> None:
        self.calls += 1
        if self.calls >= 3:
            self.fault()

    def read(self, size: int = -1, /) -> bytes:
        self._count()
        return super().read(size)

    def readinto(self, buffer: Any, /) -> int:
        self._count()
        return super().readinto(buffer)


class _Files(FileSystem):
    fault = staticmethod(_nothing)

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with _Stream(path, mode) as stream:
            stream.fault = self.fault  # type: ignore[assignment]
            yield stream


class StockReader(FileSystemReader):
    """Stock's reader, which fails when it opens, or while it reads an entry."""

    point, fault = "", staticmethod(_nothing)

    def read_data(self, plan: Any, planner: Any) -> Any:
        if self.point == "opening":
            self.fault()
        if self.point == "reading":
            self.fs = _Files()
            self.fs.fault = self.fault  # type: ignore[assignment]
        return super().read_data(plan, planner)


def streaming_reader(path: str, point: str, fault: Callable[[], None]) -> StreamingReader:
    """Ours, over a store that fails at its first read of data, or at its third."""
    script = Script()
    first = {"opening": 1, "reading": 3}.get(point, math.inf)

    def before(operation: str, name: str) -> None:
        if operation == "read" and script.count("read") >= first:
            fault()

    script.before = before
    return StreamingReader(
        path, backend=script.store, stall_seconds=STALL, retry=RetryPolicy(tries=1)
    )


def make(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A replicated model whose state is large enough for each rank to read a part of it."""
    model = wrap_fsdp1(Mlp(width=320, hidden=1200), strategy="NO_SHARD")
    optim = OPTIMIZERS["adamw"](model.parameters())
    train_steps(model, optim, steps)
    return model, optim


def save(rank: int, world: int, path: str) -> None:
    model, optim = make(2)
    dcp.save(
        {"optim": optim.state_dict(), "note": {"epoch": 3}},
        storage_writer=StreamingWriter(path),
        planner=FlatOptimSavePlanner(model, optim),
    )


def digest(state: Any) -> str:
    found = hashlib.sha256()

    def walk(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.update(raw(value))
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                found.update(str(key).encode())
                walk(value[key])
        elif isinstance(value, (list, tuple)):
            for each in value:
                walk(each)
        else:
            found.update(repr(value).encode())

    walk(state)
    return found.hexdigest()


class _Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def texts(error: BaseException) -> str:
    """The error's text, and those that a CheckpointException holds for ranks."""
    held = getattr(error, "failures", None)
    inner = [f"rank {n}: {e[0]!r}" for n, e in held.items()] if isinstance(held, dict) else []
    return "\n".join([f"{type(error).__name__}: {error}", *inner])


def rank_main(
    rank: int, folder: str, path: str, point: str, kind: str, reader: str, pipe: Any
) -> None:
    os.setpgid(0, 0)
    output = os.open(f"{folder}/log-{rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    try:
        pipe.send(_rank(rank, Path(folder), path, point, kind, reader))
    except BaseException:
        pipe.send(traceback.format_exc())
    pipe.recv()  # until the parent has all reports: a rank that ends also closes connections
    os._exit(0)


def _rank(rank: int, folder: Path, path: str, point: str, kind: str, reader: str) -> Report:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=LIMIT),
    )
    group = dist.new_group(timeout=timedelta(seconds=JOB_TIMEOUT))
    log = _Log()
    logging.getLogger("dcp_fsdp_osd").addHandler(log)
    model, optim = make(1)
    fault: Callable[[], None] = _nothing
    if rank == VICTIM:
        fault = Fault(kind, folder / "fault")
        strike(point, fault)
    planner = FlatOptimLoadPlanner(model, optim, broadcast=True, stall_seconds=STALL)
    storage: Any
    if reader == "stock":
        storage = StockReader(path)
        storage.point, storage.fault = point, fault
    else:
        storage = streaming_reader(path, point, fault)
    state = {"optim": optim.state_dict(), "note": {"epoch": 0}}
    before = digest(optim.state_dict())
    dist.barrier()
    error, text = "", ""
    try:
        dcp.load(state, storage_reader=storage, planner=planner, process_group=group)
    except BaseException as raised:
        error, text = type(raised).__name__, texts(raised)
    now = time.monotonic()
    note = folder / "fault"
    with contextlib.suppress(ValueError):
        now -= float(note.read_text()) if note.exists() else now
    end = time.monotonic() + STALL + 2
    while (left := _our_threads()) and time.monotonic() < end:
        time.sleep(0.05)
    return Report(
        error, text, "\n".join(log.lines), now, digest(optim.state_dict()) == before, left
    )


def _our_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("dcp_fsdp_osd-exchange")]


def run_case(folder: Path, path: str, point: str, kind: str, reader: str) -> dict[int, Report]:
    """Reports of the ranks that lived to give one.  Nothing of it is left running."""
    context = get_context("forkserver")
    pipes, processes = {}, []
    for rank in range(WORLD):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=rank_main, args=(rank, str(folder), path, point, kind, reader, theirs)
        )
        process.start()
        theirs.close()
        pipes[ours] = rank
        processes.append(process)
    reports: dict[int, Report] = {}
    end = time.monotonic() + LIMIT
    waiting = set(pipes)
    survivors = set(range(WORLD)) - {VICTIM}
    try:
        while waiting and (left := end - time.monotonic()) > 0:
            for pipe in connection.wait(list(waiting), left):
                waiting.discard(pipe)  # type: ignore[arg-type]
                with contextlib.suppress(EOFError, OSError):
                    found = pipe.recv()  # type: ignore[union-attr]
                    if isinstance(found, str):
                        raise RuntimeError(found)
                    reports[pipes[pipe]] = found  # type: ignore[index]
            if kind in ("hang", "stop") and survivors <= reports.keys():
                end = min(end, time.monotonic() + 3)  # the victim may still speak
    finally:
        for process in processes:
            for send in (os.killpg, os.kill):
                with contextlib.suppress(OSError, TypeError):
                    send(process.pid, signal.SIGKILL)  # type: ignore[arg-type]
            process.join(5)
    return reports
