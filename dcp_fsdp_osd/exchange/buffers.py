"""Memory of an exchange: bytes of views, what is held to be broadcast, and a staging buffer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch.distributed.checkpoint.planner import ReadItem

__all__ = ["Held", "Staging", "one_stretch", "pack", "unpack"]

HELD_BYTES = 64 << 20
"""What is read for others alone and not yet sent, before reading waits."""
STAGING_BYTES = 32 << 20
"""Bytes of a buffer that is kept; as much as a round moves."""


class Held:
    """Reads for others, which have memory of their own.  Not thread-safe.

    Args:
        dtypes: of these reads.
        uses: how many messages each is sent in, after which its memory is let go.
    """

    def __init__(
        self, dtypes: Mapping[ReadItem, torch.dtype | None], uses: Counter[ReadItem]
    ) -> None:
        self._dtypes, self._uses = dtypes, uses
        self._tensors: dict[ReadItem, torch.Tensor] = {}
        self._bytes = 0

    def __contains__(self, item: ReadItem) -> bool:
        return item in self._dtypes

    def __getitem__(self, item: ReadItem) -> torch.Tensor:
        return self._tensors[item]

    @property
    def full(self) -> bool:
        return self._bytes > HELD_BYTES

    def resolve(self, item: ReadItem) -> torch.Tensor | None:
        """The memory of a read, allocated when it is first asked for; None if it is not one."""
        if item not in self._dtypes:
            return None
        if item not in self._tensors:
            self._tensors[item] = torch.empty(item.lengths, dtype=self._dtypes[item], device="cpu")
            self._bytes += self._tensors[item].nbytes
        return self._tensors[item]

    def drop(self, items: Iterable[ReadItem]) -> None:
        """One message of each has been sent."""
        for item in items:
            self._uses[item] -= 1
            if not self._uses[item] and item in self._tensors:
                self._bytes -= self._tensors.pop(item).nbytes

    def clear(self) -> None:
        self._tensors.clear()
        self._bytes = 0


class Staging:
    """Memory for one round at a time: from a buffer that is kept, or fresh beyond it."""

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None
        self._used = 0

    def reset(self) -> None:
        """What was taken is free again."""
        self._used = 0

    def take(self, size: int, device: torch.device) -> torch.Tensor:
        """``size`` bytes on ``device``, 1-D uint8, with any content."""
        if self._buffer is None or (self._buffer.device != device and not self._used):
            self._buffer = torch.empty(STAGING_BYTES, dtype=torch.uint8, device=device)
        if self._buffer.device != device or self._used + size > self._buffer.numel():
            return torch.empty(size, dtype=torch.uint8, device=device)
        start, self._used = self._used, self._used + size
        return self._buffer[start : start + size]


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory, 1-D uint8."""
    return tensor.reshape(-1).view(torch.uint8)


def one_stretch(views: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor | None:
    """The views as one stretch of bytes, where they are one in memory on ``device``."""
    end = None
    for view in views:
        if not view.is_contiguous() or view.device != device:
            return None
        if end is not None and view.data_ptr() != end:
            return None
        end = view.data_ptr() + view.nbytes
    first = _bytes_of(views[0])
    if len(views) == 1:
        return first
    total = sum(view.nbytes for view in views)
    storage = first.untyped_storage()
    if first.storage_offset() + total > storage.nbytes():
        return None  # neighbours by chance
    return first.as_strided((total,), (1,))


def pack(views: Sequence[torch.Tensor], data: torch.Tensor) -> None:
    """Copy the views' bytes into ``data``, one after another."""
    position = 0
    for view in views:
        data[position : position + view.nbytes].copy_(_bytes_of(view.contiguous()))
        position += view.nbytes


def unpack(data: torch.Tensor, views: Sequence[torch.Tensor]) -> None:
    """Copy bytes of ``data`` into the views, one after another; the reverse of :func:`pack`.

    Bytes need not lie at multiples of an element's size.
    """
    position = 0
    for view in views:
        raw = data[position : position + view.nbytes]
        position += view.nbytes
        if view.is_contiguous():
            _bytes_of(view).copy_(raw)
        else:
            fresh = torch.empty(view.shape, dtype=view.dtype, device=data.device)
            _bytes_of(fresh).copy_(raw)
            view.copy_(fresh)
