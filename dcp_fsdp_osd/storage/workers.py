"""Threads that the end of the process does not wait for.

``concurrent.futures.ThreadPoolExecutor`` joins its threads when the interpreter ends, also one that
hangs in a system call for ever.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

__all__ = ["Workers"]

_Task = tuple[Future[Any], Callable[[], Any]]


class Workers:
    """Up to `count` daemon threads, each begun when a task finds none idle.

    Called from one thread.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Run `call` on a thread, after what was submitted before it has begun."""
        future: Future[Any] = Future()
        self._tasks.put((future, call))
        if not self._idle.acquire(blocking=False) and len(self._threads) < self._count:
            thread = threading.Thread(
                target=_work, args=(self._tasks, self._idle), name=self._name, daemon=True
            )
            self._threads.append(thread)
            thread.start()
        return future

    def end(self, seconds: float | None) -> bool:
        """Take no more tasks, and wait for those under way; whether all have ended within time."""
        for _ in self._threads:
            self._tasks.put(None)
        deadline = None if seconds is None else time.monotonic() + seconds
        for thread in self._threads:
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            thread.join(left)
        return not any(thread.is_alive() for thread in self._threads)


def _work(tasks: queue.SimpleQueue[_Task | None], idle: threading.Semaphore) -> None:
    while (task := tasks.get()) is not None:
        future, call = task
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
        # A thread that waits holds nothing of the task that it has done.
        del task, future, call
        idle.release()
