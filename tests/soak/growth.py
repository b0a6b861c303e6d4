"""Whether processes that live long keep what they should let go of."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Used", "grown", "used"]

SLACK = 24 << 20
"""Bytes that a process may grow by between two thirds of its samples; what a leak of one small
checkpoint a round makes of some hundred rounds is more."""


@dataclass(frozen=True)
class Used:
    """What a process holds: resident bytes, open files, and threads (native ones too, but not those
    that asyncio makes for name look-ups, up to its bound, and keeps)."""

    pid: int
    resident: int
    files: int
    threads: int


def used(rank: int = 0, world: int = 1) -> Used:
    """Of this process, after it has let go of what nobody refers to."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    files = len(list(Path("/proc/self/fd").iterdir()))
    threads = len(list(Path("/proc/self/task").iterdir()))
    kept = sum(each.name.startswith("asyncio_") for each in threading.enumerate())
    return Used(os.getpid(), resident, files, threads - kept)


def grown(samples: Sequence[Used], slack: int = SLACK) -> list[str]:
    """What is more at the end of `samples` than it was when a third of them was taken.

    The least of thirds is compared, as a sample may fall on a busy moment (connections that are
    closed when they have been idle for a while); the first third is for what is made once
    (clients, caches, the allocator's arenas).
    """
    third = len(samples) // 3
    if not third:
        return []
    middle, last = samples[third : 2 * third], samples[-third:]
    found = []
    for name, allowed in (("resident", slack), ("files", 0), ("threads", 0)):
        before, after = (min(getattr(each, name) for each in part) for part in (middle, last))
        if after - before > allowed:
            found.append(f"{name} grew from {before} to {after} (samples: {len(samples)})")
    return found
