"""Freed memory that the C library keeps would hide what the next measurement uses."""

from __future__ import annotations

import ctypes
import gc

__all__ = ["release_freed_memory"]


def release_freed_memory() -> None:
    """Give freed memory back to the system, so that using it again shows as memory used.

    Call before :class:`benchmarks.measure.PeakMemory`.  Only glibc can; elsewhere this collects
    garbage and no more.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
