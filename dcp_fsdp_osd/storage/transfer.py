"""Bounded concurrent IO: retries, a memory budget, and a pool whose first error ends it.

Nothing here knows of checkpoints.  Work is submitted from one thread (the caller's, which is also
the only one that talks to a planner) and runs on a pool of threads that lives as long as the
``with`` block.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

from dcp_fsdp_osd.errors import FlatOptimError, StorageError, message_of
from dcp_fsdp_osd.storage.level import Level
from dcp_fsdp_osd.storage.redact import cleaned, redact
from dcp_fsdp_osd.storage.store import NoRetryError, Store
from dcp_fsdp_osd.storage.workers import Workers

__all__ = [
    "Budget",
    "Deadline",
    "InOrder",
    "Pool",
    "RetryPolicy",
    "StalledError",
    "Stats",
    "bounded",
    "retrying",
]

logger = logging.getLogger(__name__)
T = TypeVar("T")


class StalledError(StorageError):
    """Storage does not answer.  What was asked of it may yet happen, at any time."""


@dataclass
class Stats:
    """What one save or load did; readable at any time, complete when it is over.

    Attributes:
        bytes: payload and envelope bytes moved to or from the store.
        needed: bytes of them that the plan asked for (tensor elements and byte items).
        requests: calls to the store that move or look up data, retries included.
        retries: calls that failed and were made again.
        peak_inflight: most bytes held in buffers at one time.
        seconds: wall time by phase, in seconds.
    """

    bytes: int = 0
    needed: int = 0
    requests: int = 0
    retries: int = 0
    peak_inflight: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, **counts: int) -> None:
        with self._lock:
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the time that the ``with`` block takes to a phase."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - begin
            with self._lock:
                self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())


@dataclass(frozen=True)
class RetryPolicy:
    """Transient errors are retried `tries` - 1 times, within `seconds` of the first one.

    The pause before try n+1 is drawn from [0, min(`longest`, `first` * 2**n)] seconds: full
    jitter, so that thousands of ranks that were throttled together do not come back together
    (Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015).
    """

    tries: int = 8
    seconds: float = 120.0
    first: float = 0.1
    longest: float = 10.0


def retrying(
    call: Callable[[], T],
    *,
    store: Store,
    policy: RetryPolicy,
    stats: Stats,
    what: str,
    rank: int,
    secrets: Mapping[str, Any],
    stopped: Callable[[], bool] = lambda: False,
) -> T:
    """`call()`, again and again while it fails transiently.

    Errors of this package, missing files and existing files pass through unchanged.

    Raises:
        StorageError: the error is permanent, or the policy is used up; names `what`, the rank and
            the count of tries.
    """
    begin: float | None = None  # of failing
    for attempt in range(1, policy.tries + 1):
        stats.add(requests=1)
        try:
            return call()
        except (FlatOptimError, FileNotFoundError, FileExistsError, EOFError):
            raise
        except Exception as raised:
            error = raised.__cause__ if isinstance(raised, NoRetryError) else raised
            if not isinstance(error, Exception):
                error = raised
            begin = time.monotonic() if begin is None else begin
            pause = random.uniform(0, min(policy.longest, policy.first * 2**attempt))
            over = time.monotonic() + pause - begin > policy.seconds
            over = over or attempt == policy.tries or stopped()
            if over or isinstance(raised, NoRetryError) or not store.is_transient(error):
                failure = error
                break
            stats.add(retries=1)
            logger.warning("%s: try %d failed with %s", what, attempt, type(error).__name__)
            time.sleep(pause)
    # Here, where what was caught is not the context of what is raised: it may hold secrets.
    text = redact(f"{type(failure).__name__}: {message_of(failure)}", secrets)
    tried = f"{attempt} {'try' if attempt == 1 else 'tries'}"
    raise StorageError(f"{what}: rank {rank} gave up after {tried}: {text[:500]}") from cleaned(
        failure, secrets
    )


def bounded(call: Callable[[], T], *, stall: float, what: str) -> T:
    """`call()` on a thread of its own, for the caller that has nothing else to do meanwhile.

    A thread that hangs is left behind, as those of :class:`Pool` are, with the memory that it was
    given.

    Raises:
        StalledError: it has not ended in `stall` seconds.
    """
    thread = Workers(1, "dcp_fsdp_osd_call")
    future = thread.submit(call)
    if not thread.end(stall) and not future.done():
        raise StalledError(
            f"{what}: no answer for {stall:.0f} s; see whether the mount or the server is alive, "
            "and raise stall_seconds where it is only slow"
        )
    try:
        return future.result()  # type: ignore[no-any-return]
    finally:
        del future  # an error refers to this frame


class Deadline:
    """A moment `seconds` from now, by which a save is to be committed; never for None."""

    def __init__(self, seconds: float | None) -> None:
        self._at = None if seconds is None else time.monotonic() + seconds

    def left(self) -> float | None:
        """Seconds until then, 0 once it is over; None for ever."""
        return None if self._at is None else max(self._at - time.monotonic(), 0.0)

    def check(self, what: str) -> None:
        """Raise StorageError once it is over; `what` begins the message."""
        if self.left() == 0:
            raise StorageError(
                f"{what}: the deadline is over and the save is not committed: it is given up, and "
                "what it wrote is removed"
            )


class Budget:
    """Bytes that may be held at one time.  Thread-safe; nothing here waits.

    A request for more than the whole budget is granted when all of it is free: one thing that
    cannot be cut (a ``torch.save`` object) may be larger than the limit.
    """

    def __init__(self, limit: int, stats: Stats) -> None:
        self.limit = limit
        self._used = 0
        self._stats = stats
        self._lock = threading.Lock()

    def try_acquire(self, count: int) -> bool:
        with self._lock:
            if self._used and self._used + count > self.limit:
                return False
            self._used += count
            self._stats.peak_inflight = max(self._stats.peak_inflight, self._used)
            return True

    def release(self, count: int) -> None:
        with self._lock:
            self._used -= count


class Pool:
    """Threads for blocking calls.  Use as a context manager, from one thread.

    How many run at a time is the `level`'s to say, which learns from the bytes that are counted.

    The first error of a task stops the pool: queued tasks are cancelled, and :meth:`submit`,
    :meth:`poll` and :meth:`drain` raise it.  Leaving the block waits for running tasks, unless they
    have stalled: when for `stall` seconds no task ends and none is retried, ``StorageError`` is
    raised and threads that hang in a system call are left behind.  They may wake up at any time:
    what they were given must be memory that nobody else uses, or be taken from them.  So it is when
    a `deadline` passes while a task is waited for.
    """

    def __init__(
        self,
        level: Level,
        *,
        stall: float,
        what: str,
        stats: Stats,
        deadline: Deadline | None = None,
    ) -> None:
        self._stall = stall
        self._deadline = deadline or Deadline(None)
        self._what = what
        self._stats = stats
        self._pending: set[Future[Any]] = set()
        self._patience = 1
        self._stop = threading.Event()
        self._abandoned = False
        self._level = level
        self._done = 0
        self._workers = Workers(level.now, "dcp_fsdp_osd")

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._stop.set()
            for future in self._pending:
                future.cancel()
        # After an error another task may hang: it gets as long as it would have had without.
        self._workers.end(0 if self._abandoned else self._stall if error is not None else None)

    def stopped(self) -> bool:
        """Whether a task has failed; long tasks look at it between steps."""
        return self._stop.is_set()

    @property
    def pending(self) -> int:
        """Tasks submitted and not collected yet."""
        return len(self._pending)

    @property
    def full(self) -> bool:
        """Whether as many tasks wait as run: enough for each thread to find another one."""
        return len(self._pending) >= 2 * self._level.now

    def submit(self, call: Callable[[], Any], *, patience: int = 1) -> None:
        """Run `call` on a thread.  Its result comes out of :meth:`poll`.

        Calls that take long without a sign of life, as an fsync does, have `patience` times the
        stall limit, and so have all that are submitted after them.
        """
        self._patience = max(self._patience, patience)
        self._pending.add(self._workers.submit(call))

    def poll(self, *, block: bool) -> list[Any]:
        """Results of tasks that have ended, in no order; waits for one with `block`."""
        if not self._pending:
            return []
        # What was collected last time has been counted by now.
        before = self._level.now
        if self._level.observe(self._stats.bytes, self._done, time.perf_counter()) != before:
            self._workers.allow(self._level.now)
        done: set[Future[Any]] = set()
        stall = self._stall * self._patience
        while not done:
            retries = self._stats.retries
            left = self._deadline.left()
            seconds = stall if left is None else min(stall, left)
            done, self._pending = wait(
                self._pending, seconds if block else 0, return_when=FIRST_COMPLETED
            )
            if not block:
                break
            if not done and self._deadline.left() == 0:
                self._abandoned = True
                self._stop.set()
                self._deadline.check(self._what)
            if seconds < stall:
                continue
            # While the storage answers with errors, the retry policy is what limits the wait.
            if not done and self._stats.retries == retries:
                self._abandoned = True
                self._stop.set()
                raise StalledError(
                    f"{self._what}: nothing was transferred for {stall:.0f} s; the storage "
                    "accepts requests and does not answer them"
                )
        self._done += len(done)
        results = []
        for future in done:
            error = future.exception()
            if error is not None:
                self._stop.set()
                raise error
            results.append(future.result())
        return results

    def wait_for_one(self, count: int, budget: Budget) -> list[Any]:
        """Results of at least one task, for a caller who needs `count` bytes of `budget`."""
        if not self._pending:
            raise StorageError(
                f"{self._what}: {count} bytes do not fit into max_inflight_bytes={budget.limit} "
                "beside the buffers that are being filled"
            )
        return self.poll(block=True)

    def drain(self) -> list[Any]:
        """Wait for all tasks; their results."""
        results: list[Any] = []
        while self._pending:
            results += self.poll(block=True)
        return results


class InOrder:
    """Lets the writes of one file through in order, where its store takes them in no other way.

    Tasks start in the order of submission, so the one that is waited for runs already.
    """

    def __init__(self, stopped: Callable[[], bool], *, needed: bool) -> None:
        self._stopped = stopped
        self._needed = needed
        self._next = 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def turn(self, offset: int, size: int) -> Iterator[None]:
        """Wait until all bytes before `offset` are written, then write `size` more."""
        if not self._needed:
            yield
            return
        with self._changed:
            while self._next != offset:
                if self._stopped():
                    raise StorageError("another write failed")
                self._changed.wait(0.1)
        yield
        with self._changed:
            self._next = offset + size
            self._changed.notify_all()
