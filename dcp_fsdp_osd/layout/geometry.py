"""Intervals of a row-major tensor as boxes, and boxes as views.  Pure: no IO, no ranks.

FSDP leaves each rank one interval ``[start, stop)`` of the elements of a parameter, counted
in row-major order.  DCP speaks of boxes (``ChunkStorageMetadata``: offsets and sizes).  Here
is the translation: an interval of an N-D tensor is at most ``2 N - 1`` boxes, each of which
is contiguous both in the tensor and in the rank's flat memory.

All intervals are half-open and count elements, not bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

__all__ = ["Box", "box_view", "boxes_of_interval", "dim_order", "narrowed_view"]


@dataclass(frozen=True)
class Box:
    """A box of an N-D tensor: ``offsets[d] <= index[d] < offsets[d] + sizes[d]``."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def shifted(self, by: Sequence[int]) -> Box:
        return Box(tuple(a + b for a, b in zip(self.offsets, by, strict=True)), self.sizes)

    def overlap(self, other: Box) -> Box | None:
        """The elements in both boxes (offsets in the whole tensor), or None if there are none."""
        offsets, sizes = [], []
        for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True):
            low, high = max(a, b), min(a + n, b + m)
            if low >= high:
                return None
            offsets.append(low)
            sizes.append(high - low)
        return Box(tuple(offsets), tuple(sizes))


def boxes_of_interval(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Cut elements ``[start, stop)`` of a row-major tensor of ``shape`` into boxes.

    The boxes come in the order of their elements, so their flat positions follow one another:
    the k-th box begins at ``start`` plus the numels of the boxes before it.  An empty interval
    gives no box, except that a tensor without elements gives the one box that is all of it
    (DCP needs a chunk to know the tensor exists).

    Raises:
        ValueError: unless ``0 <= start <= stop <= numel``.
    """
    shape = tuple(shape)
    numel = math.prod(shape)
    if not 0 <= start <= stop <= numel:
        raise ValueError(
            f"expected an interval within [0, {numel}) of a tensor of shape {shape}, "
            f"found [{start}, {stop})"
        )
    if numel == 0:
        return [Box((0,) * len(shape), shape)]
    return list(_cut(shape, start, stop))


def _cut(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    if start == stop:
        return
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if first == last:  # within one row
        yield from _below(first, _cut(shape[1:], head, tail))
        return
    if head:
        yield from _below(first, _cut(shape[1:], head, row))
        first += 1
    if first < last:
        yield Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    if tail:
        yield from _below(last, _cut(shape[1:], 0, tail))


def _below(index: int, boxes: Iterator[Box]) -> Iterator[Box]:
    """Boxes of row ``index`` as boxes of the tensor."""
    for box in boxes:
        yield Box((index, *box.offsets), (1, *box.sizes))


def box_view(flat: torch.Tensor, offset: int, sizes: Sequence[int]) -> torch.Tensor:
    """Elements ``[offset, offset + prod(sizes))`` of the 1-D ``flat`` as a tensor of ``sizes``.

    A view: it shares and keeps alive the memory of ``flat``.
    """
    return flat[offset : offset + math.prod(sizes)].view(tuple(sizes))


def narrowed_view(
    tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]
) -> torch.Tensor:
    """The box of ``tensor`` at ``offsets`` of ``sizes``, as a view of it."""
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


def dim_order(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """The order in which a dense tensor's dimensions lie in memory, slowest first.

    ``None`` for row-major order (the usual case).  Dimensions of size 1 lie nowhere in
    particular and keep their place.

    Raises:
        ValueError: the strides leave holes or overlap; no order of dimensions explains them.
    """
    if math.prod(shape) == 0 or _is_dense(shape, strides, range(len(shape))):
        return None
    order = tuple(sorted(range(len(shape)), key=lambda d: (-strides[d], d)))
    if not _is_dense(shape, strides, order):
        raise ValueError(f"strides {tuple(strides)} do not fill a tensor of shape {tuple(shape)}")
    return order


def _is_dense(shape: Sequence[int], strides: Sequence[int], order: Sequence[int]) -> bool:
    expected = 1
    for d in reversed(order):
        if shape[d] != 1 and strides[d] != expected:
            return False
        expected *= shape[d]
    return True
