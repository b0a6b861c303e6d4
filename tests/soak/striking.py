"""What strikes one rank, in the rank: by the store's calls, or by the clock."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from dcp_fsdp_osd.storage.location import local_path
from dcp_fsdp_osd.storage.opening import open_store
from dcp_fsdp_osd.storage.store import StoreConfig
from tests.soak.rounds import Strike

__all__ = ["aimed", "fallen", "striking"]

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
            falls = number == self.strike.call or (what == "full" and number >= self.strike.call)
            if self.strike.counts or not (falls or what == "slow"):
                return
            # Before it happens: a process that is killed says nothing afterwards.
            with Path(f"{self.strike.note}.fell").open("a") as file:
                file.write(f"{operation}\n")
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
    if not strike.what or (rank != strike.victim and not strike.counts):
        yield options
        return
    begin = time.monotonic()
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
        if strike.counts:
            about = {"calls": blow.calls, "seconds": time.monotonic() - begin}
            Path(f"{strike.note}.{rank}").write_text(json.dumps(about))
    finally:
        blow.over.set()
        end = time.monotonic() + 5
        while set(threading.enumerate()) - before and time.monotonic() < end:
            time.sleep(0.01)


def aimed(strike: Strike, world: int) -> Strike:
    """The strike, where it meets something: by what ranks counted of an undisturbed run."""
    counted = [json.loads(Path(f"{strike.note}.{rank}").read_text()) for rank in range(world)]
    order = [(strike.victim + n) % world for n in range(world)]
    victim = next((rank for rank in order if counted[rank]["calls"]), strike.victim)
    if strike.clock:
        seconds = max(counted[victim]["seconds"] * strike.at, 0.001)
        return replace(strike, victim=victim, after=seconds)
    return replace(strike, victim=victim, call=int(strike.at * counted[victim]["calls"]))


def fallen(strike: Strike) -> int:
    """How often it fell; a strike by the clock tells nobody."""
    path = Path(f"{strike.note}.fell")
    return len(path.read_text().splitlines()) if strike.note and path.exists() else 0
