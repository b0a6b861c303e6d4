"""Threads that the end of the process does not wait for.

``concurrent.futures.ThreadPoolExecutor`` joins its threads when the interpreter ends, also one that
hangs in a system call for ever.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

__all__ = ["Workers"]

_Task = tuple[Future[Any], Callable[[], Any]]


class _Queue:
    """Tasks in order, None for a thread that is to end, and how many threads wait for one."""

    def __init__(self) -> None:
        self.waiting = 0
        self._tasks: deque[_Task | None] = deque()
        self._changed = threading.Condition()

    def put(self, task: _Task | None) -> int:
        """How many tasks no thread waits for."""
        with self._changed:
            self._tasks.append(task)
            self._changed.notify()
            return len(self._tasks) - self.waiting

    def get(self) -> _Task | None:
        with self._changed:
            self.waiting += 1
            while not self._tasks:
                self._changed.wait()
            self.waiting -= 1
            return self._tasks.popleft()

    def unclaimed(self) -> int:
        """How many tasks no thread waits for."""
        with self._changed:
            return len(self._tasks) - self.waiting


class Workers:
    """Up to `count` daemon threads, each begun when a task finds none idle.

    Called from one thread, as is :meth:`allow`, which changes the count.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._tasks = _Queue()
        self._threads: list[threading.Thread] = []
        self._living = 0  # and not told to end

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Run `call` on a thread, after what was submitted before it has begun."""
        future: Future[Any] = Future()
        if self._tasks.put((future, call)) > 0 and self._living < self._count:
            self._begin()
        return future

    def allow(self, count: int) -> None:
        """Up to so many threads from now on; more of them than before begin with what waits, and
        surplus ones end after what was submitted before.
        """
        self._count = count
        while self._living > count:
            self._tasks.put(None)
            self._living -= 1
        for _ in range(min(self._tasks.unclaimed(), count - self._living)):
            self._begin()

    def _begin(self) -> None:
        self._living += 1
        thread = threading.Thread(target=_work, args=(self._tasks,), name=self._name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def end(self, seconds: float | None) -> bool:
        """Take no more tasks, and wait for those under way; whether all have ended within time."""
        for _ in range(self._living):
            self._tasks.put(None)
        deadline = None if seconds is None else time.monotonic() + seconds
        for thread in self._threads:
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            thread.join(left)
        return not any(thread.is_alive() for thread in self._threads)


def _work(tasks: _Queue) -> None:
    while (task := tasks.get()) is not None:
        future, call = task
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
        # A thread that waits holds nothing of the task that it has done.
        del task, future, call
