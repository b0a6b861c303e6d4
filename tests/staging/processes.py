"""Processes that this one has spawned, as ``AsyncCheckpointerType.PROCESS`` does."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

__all__ = ["background", "kill"]


def background() -> list[int]:
    """Processes that were spawned, rather than forked, by this one, and live."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            for pid in map(int, (task / "children").read_text().split()):
                if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
    return found


def kill(pids: list[int]) -> None:
    """Return when they are dead."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            os.kill(pid, signal.SIGKILL)
            while not _is_over(Path(f"/proc/{pid}")):
                time.sleep(0.001)


def _is_over(process: Path) -> bool:
    state = (process / "stat").read_text().rpartition(")")[2].split()[0]
    return state == "Z" and len(list((process / "task").iterdir())) == 1
