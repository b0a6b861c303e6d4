"""Real ranks for tests: ``run_ranks(fn, 4, ...)`` runs ``fn`` on four gloo processes.

    def check(rank, world_size, path): ...      # module-level: it is pickled by reference

    results = run_ranks(check, 4, path)         # one result per rank, or RankError

Worker processes are kept from call to call, one pool per world size, because importing torch
costs seconds; they are forked from a server that has imported it once.  Every call
nevertheless starts clean: a new default process group over a new file, no other group, the same
seed, no cached placements of DTensor.  A pool that is not clean afterwards (a rank died or hung,
a thread was left behind) is thrown away.

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
import tempfile
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

__all__ = ["MAX_WORKERS", "RankError", "RankFailure", "close_pools", "run_ranks"]

MAX_WORKERS = 8
"""Most worker processes alive at once, over all pools; the least recently used pool goes first."""
GRACE = 5.0
"""Seconds that the other ranks get to fail by themselves after one has failed."""
GROUP_TIMEOUT = 30.0
"""Time limit of a collective, seconds."""
START_TIMEOUT = 120.0
"""Time limit for the start of a pool, seconds; it includes one import of torch."""

_PRELOAD = [
    "torch",
    "torch._dynamo",  # the first optimizer imports it, which takes seconds
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
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
    payload = pickle.dumps((fn, args))
    pool = _pools.get(world_size)
    try:
        results = pool.run(payload, timeout)
    except BaseException:
        _pools.discard_broken()
        raise
    _pools.discard_broken()
    return results


def close_pools() -> None:
    """Kill all workers; the next :func:`run_ranks` starts new ones."""
    _pools.close()


# ---------------------------------------------------------------------- the caller's side


class _Pool:
    """The workers of one world size.  ``broken`` once they cannot be used again."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.broken = False
        self._calls = 0
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        context = get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        self._pipes, self._processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_worker,
                args=(rank, world_size, theirs, str(self._log(rank)), str(self._stacks(rank))),
                name=f"rank-{rank}-of-{world_size}",
                daemon=False,  # daemons may have no children, and async_save wants one
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        try:
            failures = self._collect(time.monotonic() + START_TIMEOUT, "start")[1]
            if failures:
                raise RankError(failures, world_size, self._logs())
        except BaseException:
            self.close()
            raise

    def _log(self, rank: int) -> Path:
        return self._folder / f"{rank}.log"

    def _stacks(self, rank: int) -> Path:
        return self._folder / f"{rank}.stacks"

    def run(self, payload: bytes, timeout: float) -> list[Any]:
        self._calls += 1
        store = str(self._folder / f"store-{self._calls}")
        self.broken = True  # until proven clean: an interrupt may leave at any point
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # a dead worker: noticed when collecting
                pipe.send(("call", payload, store))
        results, failures = self._collect(time.monotonic() + timeout, "run")
        logs = self._logs() if failures else ""
        if not any(failure.type in ("Died", "Hung") for failure in failures.values()):
            clean, late = self._finish()
            self.broken = not clean or bool(late)
            failures = {**failures, **late}
        if failures:
            raise RankError(failures, self.world_size, logs)
        return [results[rank] for rank in range(self.world_size)]

    def _finish(self) -> tuple[bool, dict[int, RankFailure]]:
        """Close the process groups.  Returns whether all are clean, and who failed at it."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(("finish",))
        cleaned, failures = self._collect(time.monotonic() + GROUP_TIMEOUT, "finish")
        return len(cleaned) == self.world_size and all(cleaned.values()), failures

    def _collect(
        self, deadline: float, doing: str
    ) -> tuple[dict[int, Any], dict[int, RankFailure]]:
        """One answer per rank: results and failures.  Kills the pool on a death or a hang."""
        results: dict[int, Any] = {}
        failures: dict[int, RankFailure] = {}
        rank_of = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        waiting = set(rank_of)
        grace = None
        while waiting:
            until = deadline if grace is None else min(deadline, grace)
            ready = connection.wait(list(waiting), max(0.0, until - time.monotonic()))
            for pipe in ready:
                rank = rank_of[pipe]
                waiting.discard(pipe)
                try:
                    ok, value = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    failures[rank] = self._died(rank, doing)
                    continue
                (results if ok else failures)[rank] = value
            now = time.monotonic()
            if failures and grace is None and waiting:
                grace = now + GRACE
            if waiting and now >= deadline:
                hung = sorted(rank_of[pipe] for pipe in waiting)
                failures.update(self._hung(hung, doing))
                break
            if waiting and grace is not None and now >= grace:
                self._release(set(failures) & set(range(self.world_size)))
                grace = deadline
        if any(failure.type in ("Died", "Hung") for failure in failures.values()):
            self.broken = True
            self._kill()
        return results, failures

    def _release(self, ranks: set[int]) -> None:
        """Close the groups of ranks that failed, so that ranks which wait for them fail too."""
        for rank in ranks:
            with contextlib.suppress(OSError):
                self._pipes[rank].send(("release",))

    def _died(self, rank: int, doing: str) -> RankFailure:
        process = self._processes[rank]
        process.join(2)
        message = f"the process ended during {doing}, exit code {process.exitcode}"
        return RankFailure(rank, "Died", frozenset({"Died"}), message, "")

    def _hung(self, ranks: list[int], doing: str) -> dict[int, RankFailure]:
        for rank in ranks:
            with contextlib.suppress(OSError):
                os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.5)
        return {
            rank: RankFailure(
                rank,
                "Hung",
                frozenset({"Hung"}),
                f"no answer within the time limit during {doing}; its threads stood at:",
                self._stacks(rank).read_text() if self._stacks(rank).exists() else "(unknown)",
            )
            for rank in ranks
        }

    def _logs(self) -> str:
        parts = []
        for rank in range(self.world_size):
            with contextlib.suppress(OSError):
                text = self._log(rank).read_text(errors="replace").strip()
                if text:
                    parts.append(f"--- output of rank {rank}:\n{text[-4000:]}")
        return "\n".join(parts)

    def _kill(self) -> None:
        for process in self._processes:
            # Each worker leads a process group of its own, so its children go with it.
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(OSError):
                os.kill(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.join(5)

    def close(self) -> None:
        self.broken = True
        self._kill()
        for pipe in self._pipes:
            pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class _Pools:
    """Pools by world size, least recently used first."""

    def __init__(self) -> None:
        self._pools: OrderedDict[int, _Pool] = OrderedDict()

    def get(self, world_size: int) -> _Pool:
        if world_size in self._pools:
            self._pools.move_to_end(world_size)
            return self._pools[world_size]
        while self._pools and sum(self._pools) + world_size > MAX_WORKERS:
            self._pools.popitem(last=False)[1].close()
        pool = self._pools[world_size] = _Pool(world_size)
        return pool

    def discard_broken(self) -> None:
        for world_size, pool in list(self._pools.items()):
            if pool.broken:
                del self._pools[world_size]
                pool.close()

    def close(self) -> None:
        while self._pools:
            self._pools.popitem()[1].close()


_pools = _Pools()
atexit.register(close_pools)


# ------------------------------------------------------------------------ the rank's side


def _worker(rank: int, world_size: int, pipe: connection.Connection, log: str, stacks: str) -> None:
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

    torch.set_num_threads(1)
    pipe.send_bytes(pickle.dumps((True, None)))
    while True:
        order = orders.get()
        if order[0] != "call":  # a late "release"
            continue
        os.ftruncate(output, 0)
        before = set(threading.enumerate())
        pipe.send_bytes(_call(rank, world_size, *order[1:]))
        while order[0] != "finish":
            order = orders.get()
            _close_groups()
        pipe.send_bytes(_clean_up(rank, before))


def _listen(pipe: connection.Connection, orders: queue.SimpleQueue[tuple[Any, ...]]) -> None:
    """Take orders; when the caller is gone, end this process and its children."""
    try:
        while True:
            orders.put(pipe.recv())
    except (EOFError, OSError):
        os.killpg(0, signal.SIGKILL)


def _call(rank: int, world_size: int, payload: bytes, store: str) -> bytes:
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
            timeout=timedelta(seconds=GROUP_TIMEOUT),
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
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _close_groups()
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(1)
        # Cached placements hold meshes, and with them groups that are gone.
        _clear_sharding_prop_cache()
        gc.collect()
        new = [t for t in threading.enumerate() if t not in threads_before and t.is_alive()]
        return pickle.dumps((True, not new))
    except BaseException as error:
        return _pickled_failure(rank, error)


def _pickled_failure(rank: int, error: BaseException) -> bytes:
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    names = _type_names(error)
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


def _type_names(error: BaseException) -> frozenset[str]:
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
