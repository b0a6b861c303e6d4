"""The values that one rank loads, as a plan of reads.  Pure values, and small helpers on them."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from dcp_fsdp_osd.errors import CheckpointMismatchError, CorruptCheckpointError
from dcp_fsdp_osd.layout.flat import Piece
from dcp_fsdp_osd.layout.placements import Placed
from dcp_fsdp_osd.tree import Path

__all__ = [
    "EMPTY",
    "Leaf",
    "LoadSchedule",
    "covering_reads",
    "factored_shapes",
    "first_known",
    "known",
    "load_object",
    "object_item",
    "whole_chunk",
]


@dataclass
class Leaf:
    """One value to load.

    Attributes:
        kind: ``"local"``: this rank's piece of a flat tensor; ``"whole"``; ``"dtensor"``;
            ``"scalar"``: 0-dim, one per source; ``"object"``: no tensor, one per source;
            ``"group"``: a tensor among the options of a param group.
        param: its parameter's id, or None for state that is no parameter's.
        name: the FQN, the name in ``state``, or the key of a group's option.
        path: below the parameter's state.
        sources: FQN -> key in the checkpoint.
        shape, dtype: of the local tensor; dtype as saved.
        pieces: where in the local tensor each box lies.
        filled: how many elements are read.
        tensor: where it is read to: the optimizer's own, or allocated before reading.
        live: ``tensor`` is the optimizer's own.
        like: of kind ``"dtensor"``: how it lies on its mesh.
        extra: lies beside ``state`` and ``param_groups``; ``path`` is below the optimizer.
    """

    kind: str
    param: int | None
    name: str
    path: Path
    sources: dict[str, str]
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    pieces: dict[MetadataIndex, Piece | None] = field(default_factory=dict)
    filled: int = 0
    tensor: torch.Tensor | None = None
    live: bool = False
    like: Placed | None = None
    extra: bool = False


@dataclass
class LoadSchedule:
    """Everything that one rank reads for one optimizer.

    Attributes:
        items: the reads.
        leaves: the values that they make up.
        destinations: ``dest_index`` of a read -> its value, and the piece of it.
        problems: a line for each thing that does not match.
        keep: parameters that are skipped because of one; their state stays as it is.
        skip: FQNs that are; others of the same flat parameter may be loaded.
    """

    items: list[ReadItem] = field(default_factory=list)
    leaves: list[Leaf] = field(default_factory=list)
    destinations: dict[MetadataIndex, tuple[Leaf, Piece | None]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    keep: set[int] = field(default_factory=set)
    skip: set[str] = field(default_factory=set)


EMPTY = ChunkStorageMetadata(torch.Size(()), torch.Size(()))


def factored_shapes(sizes: set[tuple[int, ...]], shape: tuple[int, ...]) -> bool:
    """Whether a state's tensors can be factors of one of ``shape`` (Adafactor's rows and columns).

    Factors differ in shape; all of one wrong shape are those of a parameter of that shape. Where
    one has the parameter's own shape, the others are not those of another parameter.
    """
    if shape in sizes:
        return True
    return len(sizes) > 1 and all(set(size) <= {1, *shape} for size in sizes)


def covering_reads(
    key: str, storage: TensorStorageMetadata, chunks: list[ChunkStorageMetadata]
) -> list[ReadItem]:
    """The reads that fill ``chunks`` of a saved tensor.

    Raises:
        CorruptCheckpointError: the saved chunks do not hold each of their elements once.
    """
    items: list[ReadItem] = create_read_items_for_chunk_list(key, storage, chunks)
    need = sum(chunk.sizes.numel() for chunk in chunks)
    have = sum(item.lengths.numel() for item in items)
    if need != have:
        reason = "a part was never saved" if have < need else "saved parts overlap"
        raise CorruptCheckpointError(
            f"{key}: expected the checkpoint to hold all elements of {tuple(storage.size)} "
            f"once, found {have} for the {need} that this rank needs: {reason}"
        )
    return items


def whole_chunk(storage: TensorStorageMetadata) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size([0] * len(storage.size)), storage.size)


def known(storage: TensorStorageMetadata | None) -> TensorStorageMetadata:
    if storage is None:
        raise CheckpointMismatchError("expected a tensor entry, found an object")
    return storage


def first_known(stored: Mapping[str, TensorStorageMetadata | None]) -> TensorStorageMetadata:
    return known(next(iter(stored.values())))


def object_item(key: str) -> ReadItem:
    zero = torch.Size((0,))
    return ReadItem(
        type=LoadItemType.BYTE_IO,
        dest_index=MetadataIndex(key),
        dest_offsets=zero,
        storage_index=MetadataIndex(key),
        storage_offsets=zero,
        lengths=zero,
    )


def load_object(stream: io.BytesIO) -> Any:
    """A non-tensor entry, as DCP's default planner loads it.

    Pickle: what may be in it is the storage reader's to decide (``StreamingReader`` checks byte
    entries before it hands them over).
    """
    return torch.load(stream, map_location="cpu", weights_only=False)
