"""Intervals of the elements of many tensors on many ranks, in columns.  Pure.

Where the intervals of a tensor, put in order, begin at its first element, end at its last, and each
begins where the one before ends, they hold each element once. That takes one sort of all of them,
where boxes have to be compared pair by pair.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from dcp_fsdp_osd.layout.geometry import boxes_of_interval

__all__ = ["Intervals", "Tiling", "chunks_of_intervals"]

_Bounds = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes


@dataclass(frozen=True)
class Intervals:
    """Half-open intervals; one row each, in the order of their ranks.

    Attributes:
        tensors: whose elements they count; a number each.
        starts, stops: in elements.
        ranks: who holds them.
    """

    tensors: torch.Tensor
    starts: torch.Tensor
    stops: torch.Tensor
    ranks: torch.Tensor

    def tiling(self, numels: torch.Tensor) -> Tiling | None:
        """How they make up the tensors; None if they do not, or ranks cut a tensor differently.

        Args:
            numels: elements of each tensor.
        """
        order = torch.argsort(self.starts, stable=True)
        order = order[torch.argsort(self.tensors[order], stable=True)]
        tensors, starts, stops = self.tensors[order], self.starts[order], self.stops[order]
        if not len(order):
            return None if len(numels) else Tiling(order, order, order)
        begins = torch.ones(len(order), dtype=torch.bool)
        begins[1:] = tensors[1:] != tensors[:-1]
        new = begins.clone()
        new[1:] |= starts[1:] != starts[:-1]
        first = torch.where(new)[0]
        number = torch.cumsum(new, 0) - 1
        if not torch.equal(stops, stops[first][number]):
            return None
        held, opens = tensors[first], begins[first]
        expected = torch.zeros_like(held)
        expected[1:] = torch.where(opens[1:], 0, stops[first][:-1])
        closes = torch.ones_like(opens)
        closes[:-1] = opens[1:]
        whole = (
            torch.equal(starts[first], expected)
            and torch.equal(held[opens], torch.arange(len(numels)))
            and torch.equal(stops[first][closes], numels)
        )
        counts = torch.diff(torch.cat([first, torch.tensor([len(order)])]))
        return Tiling(order, first, counts) if whole else None


@dataclass(frozen=True)
class Tiling:
    """Rows that make up tensors, each element of which is in one interval.

    Attributes:
        order: the rows, such that equal intervals follow one another, the lowest rank first.
        first: of each distinct interval: where it begins in ``order``.
        counts: of each: how many rows it has.
    """

    order: torch.Tensor
    first: torch.Tensor
    counts: torch.Tensor


def chunks_of_intervals(
    size: torch.Size, starts: Sequence[int], stops: Sequence[int]
) -> tuple[list[ChunkStorageMetadata], list[int]]:
    """The boxes of intervals of a row-major tensor; and for each interval, which is its first."""
    chunks: list[ChunkStorageMetadata] = []
    firsts: list[int] = []
    row = math.prod(size[1:])
    plain = len(size) in (1, 2) and row > 0
    for start, stop in zip(starts, stops, strict=True):
        firsts.append(len(chunks))
        boxes: list[_Bounds] = []
        if plain and len(size) == 1 and start < stop:
            boxes = [((start,), (stop - start,))]
        elif plain and start < stop:
            boxes = _rows(row, start, stop)
        else:
            boxes = [(box.offsets, box.sizes) for box in boxes_of_interval(size, start, stop)]
        for offsets, sizes in boxes:
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
    return chunks, firsts


def _rows(row: int, start: int, stop: int) -> list[_Bounds]:
    """Of a matrix, with less ado than for N dimensions."""
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if first == last:
        return [((first, head), (1, tail - head))]
    boxes: list[_Bounds] = []
    if head:
        boxes.append(((first, head), (1, row - head)))
        first += 1
    if first < last:
        boxes.append(((first, 0), (last - first, row)))
    if tail:
        boxes.append(((last, 0), (1, tail)))
    return boxes
