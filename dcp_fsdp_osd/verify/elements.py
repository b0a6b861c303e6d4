"""Which elements of two tensors differ, as ranges of element numbers.  Pure."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence

import torch
from torch.distributed.tensor import DTensor

__all__ = ["Ranges", "differing", "unequal_elements"]

_BLOCK = 1 << 16  # elements compared at a time: bounds what the comparison allocates
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Ranges:
    """Half-open ranges, in order, at most ``limit`` of them: the closest are joined.

    Attributes:
        count: elements that were added.
    """

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"expected at least one range, found a limit of {limit}")
        self._limit = limit
        self._starts: list[int] = []
        self._stops: list[int] = []
        self.count = 0

    def add(self, start: int, stop: int, count: int | None = None) -> None:
        """Add ``[start, stop)``, of which ``count`` elements are meant (by default all)."""
        self.count += stop - start if count is None else count
        first = bisect.bisect_left(self._stops, start)
        last = bisect.bisect_right(self._starts, stop)
        if first < last:
            start, stop = min(start, self._starts[first]), max(stop, self._stops[last - 1])
        self._starts[first:last], self._stops[first:last] = [start], [stop]
        if len(self._starts) > self._limit:
            gaps = [b - a for a, b in zip(self._stops, self._starts[1:], strict=False)]
            least = gaps.index(min(gaps))
            del self._stops[least], self._starts[least + 1]

    def spans(self) -> list[tuple[int, int]]:
        return list(zip(self._starts, self._stops, strict=True))


def differing(
    left: torch.Tensor,
    right: torch.Tensor,
    offsets: Sequence[int],
    shape: Sequence[int],
    limit: int,
) -> Iterator[tuple[int, int, int]]:
    """Where two boxes of one tensor differ in any bit.

    Args:
        left, right: of one shape and dtype; ``right`` on any device, a local part if of a DTensor.
        offsets: where the box lies in the whole tensor of ``shape``.
        limit: most ranges of one block of elements.

    Yields:
        Start and stop of a range of row-major element numbers of the whole tensor, and how many
        elements in it differ.
    """
    if isinstance(right, DTensor):
        right = right.to_local()
    strides = [1] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        strides[d] = strides[d + 1] * shape[d + 1]
    for start in range(0, left.numel(), _BLOCK):
        stop = min(start + _BLOCK, left.numel())
        unequal = unequal_elements(_block(left, start, stop), _block(right, start, stop))
        at = unequal.nonzero().view(-1) + start
        if not at.numel():
            continue
        numbers = torch.zeros_like(at)
        for d in range(len(shape) - 1, -1, -1):
            numbers += (at % left.shape[d] + offsets[d]) * strides[d]
            at = at.div(left.shape[d], rounding_mode="floor")
        yield from _runs(numbers, limit)


def _block(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Elements [start, stop) in row-major order, on the CPU; copies no more than those."""
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor.view(-1)[start:stop].cpu()
    if not tensor.dim() or stop - start == tensor.numel():
        return tensor.contiguous().view(-1).cpu()
    row = tensor[0].numel()
    first, last = start // row, -(-stop // row)
    if last - first == 1:  # within a row, which may be larger than a block
        return _block(tensor[first], start - first * row, stop - first * row)
    rows = tensor[first:last].contiguous().view(-1)
    return rows[start - first * row : stop - first * row].cpu()


def unequal_elements(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Elementwise, bit for bit, of 1-D tensors: NaNs are compared, and the signs of zeros count."""
    size = left.element_size()
    if size in _INTEGERS:
        return left.view(_INTEGERS[size]) != right.view(_INTEGERS[size])
    parts = (left.view(torch.uint8) != right.view(torch.uint8)).view(-1, size)
    return parts.any(dim=1)


def _runs(numbers: torch.Tensor, limit: int) -> Iterator[tuple[int, int, int]]:
    """Ranges of ascending ``numbers``, at most ``limit``: across the widest gaps they are cut."""
    gaps = numbers.diff()
    cuts = (gaps > 1).nonzero().view(-1)
    if cuts.numel() >= limit:
        cuts = cuts[gaps[cuts].topk(limit - 1).indices].sort().values
    first = 0
    for last in [*cuts.tolist(), numbers.numel() - 1]:
        yield int(numbers[first]), int(numbers[last]) + 1, last + 1 - first
        first = last + 1
