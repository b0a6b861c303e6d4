"""Whether the chunks of each tensor in a checkpoint's metadata fill it, each element once.

DCP's save checks the same of what it is about to write (``_validate_global_plan``), its load does
not: there an element that no chunk holds keeps what was in memory before.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)

from dcp_fsdp_osd.errors import CorruptCheckpointError

__all__ = ["check_chunks", "check_entries", "chunks_problem"]

_Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes


def check_chunks(metadata: Metadata, *, whole: bool) -> None:
    """Check each tensor's chunks.

    Args:
        whole: they are those of all ranks.  Those of one rank need not fill the tensor.

    Raises:
        CorruptCheckpointError: they leave elements out, overlap, or lie outside; names the tensor.
    """
    for fqn, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata):
            try:
                problem = _problem(stored, whole=whole)
            except (AttributeError, TypeError, ValueError):
                problem = "no description of a tensor and its chunks"
            if problem:
                raise CorruptCheckpointError(
                    f"{fqn}: {problem}. The metadata were altered after they were written; load "
                    "another checkpoint."
                )


def _problem(stored: TensorStorageMetadata, *, whole: bool) -> str | None:
    if not isinstance(stored.chunks, list):
        return "no list of chunks"
    return chunks_problem(tuple(stored.size), stored.chunks, whole=whole)


def chunks_problem(
    size: tuple[int, ...], chunks: Iterable[ChunkStorageMetadata], *, whole: bool
) -> str | None:
    """What is wrong with the chunks of a tensor of `size`, if anything; `whole` as above."""
    boxes: list[_Box] = []
    filled = 0
    for chunk in chunks:
        if not isinstance(chunk, ChunkStorageMetadata):
            return "something that is no chunk among its chunks"
        offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
        if len(offsets) != len(size) or len(sizes) != len(size):
            return f"a chunk at {offsets} of sizes {sizes} in a tensor of sizes {size}"
        for offset, count, most in zip(offsets, sizes, size, strict=True):
            if offset < 0 or count < 0 or offset + count > most:
                return f"a chunk at {offsets} of sizes {sizes} in a tensor of sizes {size}"
        count = math.prod(sizes)
        if count:
            filled += count
            boxes.append((offsets, sizes))
    if whole and filled != math.prod(size):
        return (
            f"its chunks cover {filled} of {math.prod(size)} elements (expected each of them once)"
        )
    return _overlap(boxes) if len(boxes) > 1 else None


def _overlap(boxes: list[_Box]) -> str | None:
    """Sweeps the dimension with the most different offsets: few boxes share a place there."""
    dims = len(boxes[0][0])
    if not dims:
        return "its chunks overlap: a scalar has more than one"
    along = max(range(dims), key=lambda dim: len({offsets[dim] for offsets, _ in boxes}))
    live: list[_Box] = []
    for box in sorted(boxes, key=lambda box: box[0][along]):
        start = box[0][along]
        live = [each for each in live if each[0][along] + each[1][along] > start]
        for other in live:
            if all(a < b + m and b < a + n for a, n, b, m in zip(*box, *other, strict=True)):
                return f"its chunks at {box[0]} and at {other[0]} overlap"
        live.append(box)
    return None


def check_entries(entries: Mapping[Any, Any]) -> None:
    """Check that no two entries overlap in a file, where no checksum would find that.

    Raises:
        CorruptCheckpointError: two do; names them.
    """
    places: list[tuple[str, int, int, str]] = []
    for index, info in entries.items():
        if isinstance(info, _StorageInfo):
            fields = vars(info)  # any may be missing
            name, offset, length = map(fields.get, ("relative_path", "offset", "length"))
            if type(name) is str and type(offset) is int and type(length) is int:
                places.append((name, offset, length, index.fqn))
    for (name, offset, length, fqn), (after, start, _, other) in itertools.pairwise(sorted(places)):
        if name == after and start < offset + length:
            raise CorruptCheckpointError(
                f"{name}: the entries of {fqn} and of {other} at byte {start} overlap. The "
                "metadata were altered after they were written; load another checkpoint."
            )
