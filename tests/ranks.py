"""Real ranks for tests: ``run_ranks(fn, 4, ...)`` runs ``fn`` on four gloo processes.

    def check(rank, world_size, path): ...      # module-level: it is pickled by reference

    results = run_ranks(check, 4, path)         # one result per rank, or RankError

Worker processes are kept from call to call, because importing torch costs seconds, and serve every
world size: a call on n ranks takes the first n.  They are forked from a server that has imported
torch once.  Every call nevertheless starts clean: a new default process group over a new file, no
other group, the same seed, no cached placements of DTensor.  Workers of a call that are not clean
afterwards (a rank died or hung, a thread was left behind) are thrown away.

What goes wrong comes back as one :class:`RankError` that holds every rank's error.  When one
rank fails, its process group is kept open for :data:`GRACE` seconds, then closed, which fails
whatever the other ranks are waiting for.  So code that agrees on errors shows its own error on
each rank, at once; code that leaves the others waiting shows gloo's RuntimeError there, late.
A call that exceeds ``timeout`` is killed, children of the ranks included, and says where each
rank's threads stood.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import os
import pickle
import queue
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "GRACE",
    "RankError",
    "RankFailure",
    "RankPool",
    "close_pool",
    "mesh",
    "run_ranks",
    "type_names",
]

GRACE = 5.0
"""Seconds that the other ranks get to fail by themselves after one has failed."""
GROUP_TIMEOUT = 30.0
"""Time limit of a collective, seconds."""
START_TIMEOUT = 120.0
"""Time limit for the start of workers, seconds; it includes one import of torch."""

_PRELOAD = [
    "torch",
    "torch._dynamo",  # the first optimizer imports it, which takes seconds
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "dcp_fsdp_osd",
    "tests.planners.checks",
]


@dataclass(frozen=True)
class RankFailure:
    """One rank's error.

    ``type`` is the name of its class; ``types`` adds the names of its base classes, of what it was
    raised from, and of what a ``CheckpointException`` holds for the ranks.  ``exception`` is the
    error itself, or None where it cannot be pickled.
    """

    rank: int
    type: str
    types: frozenset[str]
    message: str
    traceback: str
    exception: BaseException | None = None


class RankError(Exception):
    """At least one rank failed; ``failures`` maps the ranks that did to their errors."""

    def __init__(self, failures: dict[int, RankFailure], world_size: int, logs: str = "") -> None:
        self.failures = failures
        self.world_size = world_size
        parts = [f"{len(failures)} of {world_size} ranks failed"]
        for rank, failure in sorted(failures.items()):
            parts.append(f"--- rank {rank}: {failure.type}: {failure.message}")
            parts.append(failure.traceback.rstrip())
        super().__init__("\n".join(parts) + (f"\n{logs}" if logs else ""))

    @property
    def types(self) -> dict[int, str]:
        """Class name of each failed rank's error."""
        return {rank: failure.type for rank, failure in sorted(self.failures.items())}

    def all_raised(self, name: str) -> bool:
        """Did every rank raise ``name``, a subclass of it, or something that holds one?"""
        return len(self.failures) == self.world_size and all(
            name in failure.types for failure in self.failures.values()
        )


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0
) -> list[Any]:
    """Run ``fn(rank, world_size, *args)`` on every rank; return the results in rank order.

    ``fn``, arguments and results are pickled; tensors go by value.  Raises :class:`RankError`
    when any rank raised, died or took longer than ``timeout`` seconds.
    """
    return _pool.run(fn, world_size, *args, timeout=timeout)


_meshes: dict[Any, DeviceMesh] = {}


def mesh(*shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    """A mesh on CPU, on a rank: the same one for all models of a call, because each mesh has
    process groups of its own, with connections and threads."""
    if (shape, names) not in _meshes:
        from torch.distributed.device_mesh import init_device_mesh

        _meshes[shape, names] = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return _meshes[shape, names]


def close_pool() -> None:
    """Kill all workers; the next :func:`run_ranks` starts new ones."""
    _pool.close()


# ---------------------------------------------------------------------- the caller's side


class _Worker:
    """One process that is rank `rank` of whatever world a call has."""

    def __init__(self, rank: int, folder: Path) -> None:
        self.rank = rank
        self.log = folder / f"{rank}.log"
        self.stacks = folder / f"{rank}.stacks"
        context = get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=_worker,
            args=(rank, theirs, str(self.log), str(self.stacks)),
            name=f"rank-{rank}",
            daemon=False,  # daemons may have no children, and async_save wants one
        )
        self.process.start()
        theirs.close()

    def send(self, *order: Any) -> None:
        with contextlib.suppress(OSError):  # a dead worker: noticed when collecting
            self.pipe.send(order)

    def died(self, doing: str) -> RankFailure:
        self.process.join(2)
        message = f"the process ended during {doing}, exit code {self.process.exitcode}"
        return RankFailure(self.rank, "Died", frozenset({"Died"}), message, "")

    def ask_where_it_stands(self) -> None:
        with contextlib.suppress(OSError):
            os.kill(self.process.pid or 0, signal.SIGUSR1)

    def hung(self, doing: str) -> RankFailure:
        message = f"no answer within the time limit during {doing}; its threads stood at:"
        stacks = self.stacks.read_text() if self.stacks.exists() else "(unknown)"
        return RankFailure(self.rank, "Hung", frozenset({"Hung"}), message, stacks)

    def output(self) -> str:
        text = ""
        with contextlib.suppress(OSError):
            text = self.log.read_text(errors="replace").strip()
        return f"--- output of rank {self.rank}:\n{text[-4000:]}" if text else ""

    def kill(self) -> None:
        # Each worker leads a process group of its own, so its children go with it.
        for kill in os.killpg, os.kill:
            with contextlib.suppress(OSError):
                kill(self.process.pid or 0, signal.SIGKILL)

    def close(self) -> None:
        self.process.join(5)
        self.pipe.close()


class RankPool:
    """Worker processes, as many as the largest world so far; a call takes the first of them.

    :func:`run_ranks` has one; another is for calls that end their workers, or run beside others.
    With `lasting`, workers are kept that have a thread more than before; the caller looks at that.
    `group_timeout` is the time limit of a collective, seconds.
    """

    def __init__(self, *, lasting: bool = False, group_timeout: float = GROUP_TIMEOUT) -> None:
        self._lasting = lasting
        self._group_timeout = group_timeout
        self._workers: list[_Worker] = []
        self._calls = 0
        self._folder: Path | None = None

    def run(
        self, fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0
    ) -> list[Any]:
        """As :func:`run_ranks`."""
        payload = pickle.dumps((fn, args))
        workers = self._started(world_size)
        self._calls += 1
        store = f"{self._folder}/store-{self._calls}"
        clean = False  # an interrupt may leave at any point
        try:
            for worker in workers:
                worker.send("call", world_size, payload, store, self._group_timeout)
            results, failures = self._collect(workers, time.monotonic() + timeout, "run")
            logs = _logs(workers) if failures else ""
            if not _lost(failures):
                clean, late = self._finish(workers)
                failures = {**failures, **late}
        finally:
            if not clean:
                self._discard(workers)
        if failures:
            raise RankError(failures, world_size, logs)
        return [results[rank] for rank in range(world_size)]

    def _started(self, world_size: int) -> list[_Worker]:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        new = [_Worker(rank, self._folder) for rank in range(len(self._workers), world_size)]
        self._workers += new
        failures = self._collect(new, time.monotonic() + START_TIMEOUT, "start")[1]
        if failures:
            logs = _logs(new)
            self._discard(new)
            raise RankError(failures, world_size, logs)
        return self._workers[:world_size]

    def _finish(self, workers: list[_Worker]) -> tuple[bool, dict[int, RankFailure]]:
        """Close the process groups.  Returns whether all are clean, and who failed at it."""
        for worker in workers:
            worker.send("finish")
        cleaned, failures = self._collect(workers, time.monotonic() + self._group_timeout, "finish")
        return not failures and (self._lasting or all(cleaned.values())), failures

    def _collect(
        self, workers: list[_Worker], deadline: float, doing: str
    ) -> tuple[dict[int, Any], dict[int, RankFailure]]:
        """One answer per rank: results and failures.  A death or a hang kills all of `workers`."""
        results: dict[int, Any] = {}
        failures: dict[int, RankFailure] = {}
        by_pipe = {worker.pipe: worker for worker in workers}
        waiting = set(by_pipe)
        grace = None
        released: set[int] = set()
        while waiting:
            until = deadline if grace is None else min(deadline, grace)
            ready = connection.wait(list(waiting), max(0.0, until - time.monotonic()))
            for pipe in ready:
                worker = by_pipe[pipe]
                waiting.discard(pipe)
                try:
                    ok, value = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    failures[worker.rank] = worker.died(doing)
                    continue
                (results if ok else failures)[worker.rank] = value
            now = time.monotonic()
            if failures and grace is None and waiting:
                grace = now + GRACE
            if waiting and now >= deadline:
                hung = [by_pipe[pipe] for pipe in waiting]
                for worker in hung:
                    worker.ask_where_it_stands()
                time.sleep(0.5)
                failures.update({worker.rank: worker.hung(doing) for worker in hung})
                break
            if waiting and grace is not None and now >= grace:
                # Those that wait for a failed rank now fail too, and then those that wait for them:
                # ranks of a subgroup need not know of who failed first.  Where a rank has died, all
                # workers are thrown away, and those that failed end at once: something (a model)
                # may hold a group that was closed, so that others go on waiting for it.
                order = "end" if _lost(failures) else "release"
                for worker in workers:
                    if worker.rank in failures and worker.rank not in released:
                        worker.send(order)
                        released.add(worker.rank)
                grace = now + 0.5
        if _lost(failures):
            for worker in workers:
                worker.kill()
        return results, failures

    def _discard(self, workers: list[_Worker]) -> None:
        """End `workers` and those of higher ranks; the next call starts new ones."""
        first = min((worker.rank for worker in workers), default=0)
        gone, self._workers = self._workers[first:], self._workers[:first]
        for worker in gone:
            worker.kill()
        for worker in gone:
            worker.close()

    def close(self) -> None:
        self._discard(self._workers)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = None


def _lost(failures: dict[int, RankFailure]) -> bool:
    return any(failure.type in ("Died", "Hung") for failure in failures.values())


def _logs(workers: list[_Worker]) -> str:
    return "\n".join(filter(None, (worker.output() for worker in workers)))


_pool = RankPool()
atexit.register(_pool.close)


# ------------------------------------------------------------------------ the rank's side


def _worker(rank: int, pipe: connection.Connection, log: str, stacks: str) -> None:
    """Main loop of a worker; returns never, the process is killed or its parent ends."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller decides, and kills
    output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    stack_file = Path(stacks).open("w")  # noqa: SIM115 - faulthandler needs it for good
    faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
    orders: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(pipe, orders), daemon=True).start()
    import torch

    from tests.torch_gaps import complete_torch

    complete_torch()
    torch.set_num_threads(1)
    gc.freeze()  # what importing torch made is not looked through after every call
    modules = len(sys.modules)
    pipe.send_bytes(pickle.dumps((True, None)))
    while True:
        order = orders.get()
        if order[0] != "call":  # a late "release"
            continue
        os.ftruncate(output, 0)
        before = set(threading.enumerate())
        pipe.send_bytes(_call(rank, *order[1:]))
        while order[0] != "finish":
            order = orders.get()
            if order[0] == "end":
                os._exit(1)
            _close_groups()
        pipe.send_bytes(_clean_up(rank, before))
        if len(sys.modules) > modules:  # likewise what a call imported; its garbage is gone
            modules = len(sys.modules)
            gc.freeze()


def _listen(pipe: connection.Connection, orders: queue.SimpleQueue[tuple[Any, ...]]) -> None:
    """Take orders; when the caller is gone, end this process and its children."""
    try:
        while True:
            orders.put(pipe.recv())
    except (EOFError, OSError):
        os.killpg(0, signal.SIGKILL)


def _call(rank: int, world_size: int, payload: bytes, store: str, group_timeout: float) -> bytes:
    """Run one call; the answer, pickled: ``(True, result)`` or ``(False, RankFailure)``."""
    import torch
    import torch.distributed as dist

    try:
        random.seed(0)
        torch.manual_seed(0)
        fn, args = pickle.loads(payload)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=group_timeout),
        )
        return pickle.dumps((True, fn(rank, world_size, *args)))
    except BaseException as error:
        return _pickled_failure(rank, error)


def _close_groups() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _clean_up(rank: int, threads_before: set[threading.Thread]) -> bytes:
    """Leave nothing of the last call behind; the answer is whether that was possible."""
    try:
        import torch

        from tests.torch_gaps import forget_placements, let_groups_rest

        _meshes.clear()
        let_groups_rest()
        _close_groups()
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(1)
        forget_placements()
        gc.collect()
        new = [t for t in threading.enumerate() if t not in threads_before and t.is_alive()]
        return pickle.dumps((True, not new))
    except BaseException as error:
        return _pickled_failure(rank, error)


def _pickled_failure(rank: int, error: BaseException) -> bytes:
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    names = type_names(error)
    bare = RankFailure(rank, type(error).__name__, names, _message(error), text)
    try:
        error.__traceback__ = None
        answer = pickle.dumps((False, RankFailure(**{**vars(bare), "exception": error})))
        pickle.loads(answer)  # what cannot be read back would fail in the caller
    except Exception:
        return pickle.dumps((False, bare))
    return answer


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as failure:
        return f"(its message failed: {failure!r})"


def type_names(error: BaseException) -> frozenset[str]:
    """Class names of ``error``, its bases, its causes and the errors that it holds for ranks."""
    names: set[str] = set()
    seen: set[int] = set()
    queue_: list[BaseException | None] = [error]
    while queue_:
        item = queue_.pop()
        if item is None or id(item) in seen:
            continue
        seen.add(id(item))
        names.update(cls.__name__ for cls in type(item).__mro__ if cls is not object)
        queue_ += [item.__cause__, item.__context__]
        held = getattr(item, "failures", None)  # CheckpointException: {rank: (error, trace)}
        for value in held.values() if isinstance(held, dict) else ():
            inner = value[0] if isinstance(value, tuple) else value
            queue_.append(inner if isinstance(inner, BaseException) else None)
    return frozenset(names)
