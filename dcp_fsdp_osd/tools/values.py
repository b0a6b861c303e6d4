"""The values of one tensor of a checkpoint: a slice of them, and figures of all of them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dcp_fsdp_osd.layout.geometry import Box
from dcp_fsdp_osd.tools.opened import Checkpoint, Progress, no_progress

__all__ = ["Figures", "figures", "parse_slice", "slice_box"]

_STEP = 1 << 20  # elements that are converted at a time
_PART = re.compile(r"\s*(-?\d+)?\s*(:)?\s*(-?\d+)?\s*")


@dataclass(frozen=True)
class Figures:
    """Of all elements of a tensor; of complex ones, of their magnitudes.

    Attributes:
        numel: how many there are.
        least, most, mean: of those that are no NaN; None where there are none.  `mean` is that of
            the finite ones.
        nans, infs, zeros: how many there are.
    """

    numel: int
    least: float | int | None
    most: float | int | None
    mean: float | None
    nans: int
    infs: int
    zeros: int


def figures(checkpoint: Checkpoint, key: str, progress: Progress = no_progress) -> Figures:
    """Figures of a tensor, which is streamed."""
    windows = checkpoint.windows([key])
    buffer = checkpoint.room(windows)
    total, done = checkpoint.nbytes(key), 0
    nans = infs = zeros = finite = 0
    sums: list[float] = []
    least: list[float | int] = []
    most: list[float | int] = []
    for parts in windows:
        for flat in checkpoint.read_parts(parts, buffer):
            for piece in torch.split(flat, _STEP):
                numbers = _comparable(piece)
                zeros += int((numbers == 0).sum())
                if numbers.is_floating_point():
                    good = numbers[~numbers.isnan()]
                    nans += numbers.numel() - good.numel()
                    bounded = good[good.isfinite()]
                    infs += good.numel() - bounded.numel()
                else:
                    good = bounded = numbers
                if good.numel():
                    least.append(good.min().item())
                    most.append(good.max().item())
                finite += bounded.numel()
                sums.append(float(bounded.sum(dtype=torch.float64)))
            done += flat.nbytes
        progress(done, total)
    return Figures(
        numel=math.prod(checkpoint.shape(key)),
        least=min(least, default=None),
        most=max(most, default=None),
        mean=math.fsum(sums) / finite if finite else None,
        nans=nans,
        infs=infs,
        zeros=zeros,
    )


def _comparable(piece: torch.Tensor) -> torch.Tensor:
    """As float64, or int64 where the elements are whole numbers."""
    if piece.is_complex():
        return piece.abs().to(torch.float64)
    if piece.is_floating_point():
        return piece.to(torch.float64)
    if piece.dtype == torch.uint64:
        return piece.to(torch.float64)
    return piece.to(torch.int64)


def parse_slice(text: str) -> list[tuple[int | None, int | None] | int]:
    """``"0:4,2,:"`` as (start, stop) or an index for each dimension from the first on.

    Raises:
        ValueError: it is none.
    """
    found: list[tuple[int | None, int | None] | int] = []
    for part in text.strip().strip("[]").split(","):
        match = _PART.fullmatch(part)
        if match is None or (match[2] is None and (match[1] is None or match[3] is not None)):
            raise ValueError(
                f"expected a slice such as 0:4 or 0:4,7,: (start:stop or an index for each "
                f"dimension), found {part!r} in {text!r}"
            )
        start, stop = (None if each is None else int(each) for each in (match[1], match[3]))
        if match[2] is None:
            assert start is not None
            found.append(start)
        else:
            found.append((start, stop))
    return found


def slice_box(
    shape: Sequence[int], wanted: Sequence[tuple[int | None, int | None] | int]
) -> tuple[Box, tuple[int, ...]]:
    """The box that a slice means, as Python cuts, and the shape of what it leaves.

    Raises:
        ValueError: it has more dimensions than the tensor, or an index out of its range.
    """
    if len(wanted) > len(shape):
        raise ValueError(
            f"expected a slice of {len(shape)} dimensions at most, as the tensor's shape is "
            f"{tuple(shape)}, found {len(wanted)}"
        )
    offsets, sizes, left = [], [], []
    for dim, size in enumerate(shape):
        each = wanted[dim] if dim < len(wanted) else (None, None)
        if isinstance(each, int):
            if not -size <= each < size:
                raise ValueError(
                    f"expected an index within dimension {dim}, which has {size}, found {each}"
                )
            offsets.append(each % size)
            sizes.append(1)
            continue
        start, stop, _ = slice(*each).indices(size)
        offsets.append(start)
        sizes.append(max(stop - start, 0))
        left.append(sizes[-1])
    return Box(tuple(offsets), tuple(sizes)), tuple(left)
