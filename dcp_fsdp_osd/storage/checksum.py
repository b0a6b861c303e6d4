"""CRC-32 checksums over memory, by whichever package is installed.

``crc32c`` (Castagnoli; the package ``crc32c``, which the extra of that name installs) runs at about
10 GB/s, ``crc32`` (zlib, always there) at 1 to 4 GB/s; both let go of the GIL for blocks of 32 KiB
and more.  A checkpoint says which one it was written with.  A reader that lacks the package raises
instead of skipping the check: ``verify=True`` never means "verified if possible".
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dcp_fsdp_osd.errors import StorageError

__all__ = ["BlockHasher", "Checksum", "RangeHasher", "best_checksum", "checksum_named"]


@dataclass(frozen=True)
class Checksum:
    """One algorithm.  Values are unsigned 32-bit; 0 is the checksum of nothing.

    Attributes:
        name: what the metadata calls it.
        raw: the checksum of what its second argument is the checksum of, followed by the first.
    """

    name: str
    raw: Callable[[memoryview | bytes, int], int]

    def extend(self, crc: int, data: memoryview | bytes) -> int:
        """The checksum of what `crc` is the checksum of, followed by `data`."""
        return self.raw(data, crc)

    def blocks(self, data: memoryview, block: int) -> list[int]:
        """The checksum of each `block` bytes of `data`, whose length is a multiple of it."""
        raw = self.raw
        return [raw(data[at : at + block], 0) for at in range(0, len(data), block)]


_ZLIB = Checksum("crc32", zlib.crc32)


def _castagnoli(*, fast: bool) -> Checksum | None:
    try:
        from crc32c import crc32c, hardware_based
    except ImportError:
        return None
    return Checksum("crc32c", crc32c) if hardware_based or not fast else None


def best_checksum() -> Checksum:
    """The fastest algorithm there is: crc32c where it is installed and the CPU has instructions
    for it, else zlib's crc32.
    """
    return _castagnoli(fast=True) or _ZLIB


def checksum_named(name: str) -> Checksum:
    """The algorithm that a checkpoint was written with.

    Raises:
        StorageError: the package that computes it is not installed, or `name` is unknown.
    """
    if name == "crc32":
        return _ZLIB
    found = _castagnoli(fast=False) if name == "crc32c" else None
    if found is None:
        raise StorageError(
            f"the checkpoint's checksums are {name!r}, which cannot be computed here: expected "
            "'crc32', or 'crc32c' with the package crc32c installed. Run `pip install "
            "'dcp-fsdp-osd[crc32c]'`, or read unchecked with StreamingReader(..., verify=False)."
        )
    return found


class BlockHasher:
    """Checksums of the consecutive blocks of a stream of bytes that comes in pieces.

    Not thread-safe.  `block` is in bytes; the last block may be shorter.
    """

    def __init__(self, checksum: Checksum, block: int) -> None:
        self._checksum = checksum
        self._block = block
        self._open = 0  # checksum of the block that is not full yet
        self._filled = 0
        self._done: list[int] = []

    def update(self, data: memoryview) -> None:
        """Take the next bytes of the stream."""
        position, size = 0, len(data)
        while position < size:
            whole = (size - position) // self._block * self._block
            if whole and not self._filled:
                part = data[position : position + whole]
                self._done += self._checksum.blocks(part, self._block)
                position += whole
                continue
            take = min(self._block - self._filled, size - position)
            self._open = self._checksum.extend(self._open, data[position : position + take])
            self._filled += take
            position += take
            if self._filled == self._block:
                self._close()

    def finish(self) -> list[int]:
        """The checksum of each block, in order.  Nothing may be added afterwards."""
        if self._filled:
            self._close()
        return self._done

    def _close(self) -> None:
        self._done.append(self._open)
        self._open = 0
        self._filled = 0


class RangeHasher:
    """Checksums of some ranges of a stream of bytes that passes by; not thread-safe.

    Args:
        position: of the stream's first byte.
        ranges: start, end and block of each, in bytes; in order, none over another.
    """

    def __init__(
        self, checksum: Checksum, position: int, ranges: Sequence[tuple[int, int, int]]
    ) -> None:
        self._position = position
        self._ranges = [(start, end, BlockHasher(checksum, block)) for start, end, block in ranges]
        self._first = 0

    def update(self, data: memoryview) -> None:
        """Take the next bytes of the stream."""
        begin, until = self._position, self._position + len(data)
        self._position = until
        for start, end, hasher in self._ranges[self._first :]:
            if start >= until:
                break
            hasher.update(data[max(start - begin, 0) : end - begin])
            if end > until:
                break
            self._first += 1

    def finish(self) -> list[list[int]]:
        """The checksum of each block of each range.  Nothing may be added afterwards."""
        return [hasher.finish() for *_, hasher in self._ranges]
