"""Memory of the benchmark's S3 server: one arena of slabs that object bodies are made of.

Fresh memory costs more than loopback does, so slabs that an object gave back are used again, the
latest first: after the first round every client meets warm memory alike.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Iterator

__all__ = ["Arena", "Body", "OutOfMemoryError"]

SLAB = 1 << 20
_MADV_POPULATE_WRITE = 23  # linux/mman.h; the mmap module has no name for it
#: ``sendfile`` hands the slab's own pages to the socket, so a slab is not written again while a
#: reader may still have a reply that lies in it: not before this many seconds.
QUARANTINE = 1.0


class OutOfMemoryError(Exception):
    """The arena is full."""


class Arena:
    """``memory`` bytes of address space; pages become real when first written."""

    def __init__(self, memory: int, *, prewarm: int = 0) -> None:
        self.count = memory // SLAB
        self.fd = os.memfd_create("s3")
        os.ftruncate(self.fd, self.count * SLAB)
        mapped = mmap.mmap(self.fd, self.count * SLAB)
        if prewarm:
            with contextlib.suppress(OSError):  # an older kernel: colder, not wrong
                mapped.madvise(_MADV_POPULATE_WRITE, 0, min(prewarm, self.count * SLAB))
        self.view = memoryview(mapped)
        self._lock = threading.Lock()
        self._fresh = 0
        self._free: list[int] = []
        self._resting: deque[tuple[float, int]] = deque()

    def take(self) -> int:
        """Offset of a slab that is now the caller's."""
        with self._lock:
            ripe = time.monotonic() - QUARANTINE
            while self._resting and self._resting[0][0] < ripe:
                self._free.append(self._resting.popleft()[1])
            if self._free:
                return self._free.pop()
            if self._fresh < self.count:
                self._fresh += 1
                return (self._fresh - 1) * SLAB
        raise OutOfMemoryError(f"more than {self.count * SLAB} bytes of objects")

    def give(self, slabs: list[int]) -> None:
        """Take slabs back; they rest for a while before they are used again."""
        now = time.monotonic()
        with self._lock:
            self._resting.extend((now, slab) for slab in slabs)


class Body:
    """Bytes of one object or part.  Written once, by one thread, then only read.

    The slabs go back to the arena when the last reference goes: a GET under way keeps the
    body that it began with, whatever is put or deleted meanwhile.
    """

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.size = 0
        self.slabs: list[int] = []

    def space(self) -> memoryview:
        """Where the next bytes go: at least one byte, to be declared by :meth:`wrote`."""
        used = self.size % SLAB
        if used == 0 and self.size == len(self.slabs) * SLAB:
            self.slabs.append(self.arena.take())
        start = self.slabs[-1] + used
        return self.arena.view[start : self.slabs[-1] + SLAB]

    def wrote(self, count: int) -> None:
        self.size += count

    def extents(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """(offset in the arena, length) of bytes [start, stop), in order; neighbours as one."""
        offset = length = 0
        while start < stop:
            slab, inside = divmod(start, SLAB)
            here = self.slabs[slab] + inside
            count = min(stop - start, SLAB - inside)
            if length and offset + length == here:
                length += count
            else:
                if length:
                    yield offset, length
                offset, length = here, count
            start += count
        if length:
            yield offset, length

    def __del__(self) -> None:
        if self.slabs:
            self.arena.give(self.slabs)
