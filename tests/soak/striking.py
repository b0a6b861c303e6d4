"""What strikes one rank, in the rank: by the store's calls, or by the clock."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from dcp_fsdp_osd.storage.location import local_path
from dcp_fsdp_osd.storage.opening import open_store
from dcp_fsdp_osd.storage.store import StoreConfig
from tests.soak.rounds import Strike

__all__ = ["striking"]

_WRITES = ("create", "write", "complete", "put")
_SPARED = ("limits", "is_transient", "close", "abort", "abort_upload", "uploads", "delete")
"""What cleans up does its work: that it may fail as well is a fault of its own."""


class _Struck:
    """A store, or an upload, whose calls are counted and struck."""

    def __init__(self, real: Any, before: Callable[[str, Any, tuple[Any, ...]], None]) -> None:
        self._real, self._before = real, before

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._real, name)
        if name in _SPARED or not callable(value):
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            self._before(name, self._real, args)
            found = value(*args, **kwargs)
            return _Struck(found, self._before) if name == "create" else found

        return call


class _Blow:
    def __init__(self, strike: Strike) -> None:
        self.strike = strike
        self.calls = 0
        self.fell = 0
        self.over = threading.Event()
        self.lock = threading.Lock()
        self.folder = ""

    def open(self, config: StoreConfig, base: Any) -> Any:
        self.folder = config.url
        return _Struck(open_store(replace(config, backend=base)), self.before)

    def before(self, operation: str, real: Any, args: tuple[Any, ...]) -> None:
        what = self.strike.what
        if what == "full" and operation not in _WRITES:
            return
        if what == "short" and operation != "complete":
            return
        with self.lock:
            number, self.calls = self.calls, self.calls + 1
            falls = number >= self.strike.call if what == "full" else number == self.strike.call
            falls = falls or what == "slow" or (what == "short" and number == 0)
            self.fell += falls
        if not falls:
            return
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "error":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if what == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if what == "transient":
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        if what == "slow":
            time.sleep(0.03)
        if what == "stall":
            self.over.wait()
            raise OSError(errno.EIO, "the stall is over")
        if what == "short":
            self._shorten(args[0])

    def _shorten(self, size: int) -> None:
        root = local_path(self.folder)
        newest = max(
            (each for each in os.scandir(root) if each.name.endswith(".distcp")),
            key=lambda each: each.stat().st_mtime_ns,
        )
        os.truncate(newest.path, max(newest.stat().st_size - 1, 0))


@contextlib.contextmanager
def striking(rank: int, strike: Strike, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Options of a reader or writer under which the strike falls on its rank, in this block."""
    if rank != strike.victim or not strike.what:
        yield options
        return
    if strike.after:
        # Its default action ends the process as SIGKILL does, and nobody has to take a turn first.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, strike.after)
        try:
            yield options
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        return
    blow = _Blow(strike)
    base = options.get("backend", "auto")
    before = set(threading.enumerate())
    try:
        yield {**options, "backend": lambda config: blow.open(config, base)}
    finally:
        blow.over.set()
        end = time.monotonic() + 5
        while set(threading.enumerate()) - before and time.monotonic() < end:
            time.sleep(0.01)
