"""What work costs, told apart from what else the machine does meanwhile."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

__all__ = ["cpu_seconds"]


def cpu_seconds(work: Callable[[], object], enough: float = 0.5, tries: int = 3) -> float:
    """CPU time of this thread, seconds: the least of so many tries, and the first below `enough`.

    Of this thread alone, because on a busy machine it may wait a second for its turn; the least,
    and without the garbage of what was imported before, because a collection of all that a test
    process holds may take as long as what is measured.
    """
    gc.collect()
    gc.freeze()
    try:
        least = float("inf")
        for _ in range(tries):
            begin = time.thread_time()
            work()
            least = min(least, time.thread_time() - begin)
            if least < enough:
                break
        return least
    finally:
        gc.unfreeze()
