"""The values that one rank loads, as a plan of reads.  Pure values, and small helpers on them."""

from __future__ import annotations

import enum
import io
from collections.abc import Iterable, Iterator, Sequence
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

from dcp_fsdp_osd.errors import CheckpointMismatchError, CorruptCheckpointError, Mismatch
from dcp_fsdp_osd.layout.flat import Piece
from dcp_fsdp_osd.layout.placements import Placed
from dcp_fsdp_osd.storage.chunks import MANY, ChunkTable, chunk_table
from dcp_fsdp_osd.tree import Path

__all__ = [
    "Kind",
    "Leaf",
    "LoadSchedule",
    "Want",
    "chunk_of",
    "load_object",
    "object_item",
    "whole_chunk",
]

Want = tuple[Piece | None, ChunkStorageMetadata]
"""A box that is wanted of a saved tensor, and where it lies in the local one (None: all of it)."""


class Kind(enum.Enum):
    """What a value is, and so how it is read."""

    PIECE = enum.auto()
    """This rank's piece of a flat tensor, 1-D."""
    WHOLE = enum.auto()
    DTENSOR = enum.auto()
    SHARDED = enum.auto()
    """This rank's rows, of what becomes a ShardedTensor or a DTensor."""
    SCALAR = enum.auto()
    """A 0-dim tensor, one per source."""
    OBJECT = enum.auto()
    """No tensor, one per source."""
    OPTION = enum.auto()
    """A tensor among the options of a param group."""
    MODEL = enum.auto()
    """A tensor of a model, in the model's own memory."""
    SKIPPED = enum.auto()


@dataclass
class Leaf:
    """One value to load.

    Attributes:
        param: its parameter's id, or None for state that is no parameter's.
        name: the FQN, the name in ``state``, or the key of a group's option.
        path: below the parameter's state.
        sources: FQN -> key in the checkpoint.
        shape, dtype: of the local tensor (of kind ``SHARDED``: of the whole); dtype as saved.
        pieces: where in the local tensor each box lies; None where it is all of it.
        filled: how many elements are read.
        tensor: where it is read to: the optimizer's own, or allocated before reading.
        in_place: ``tensor`` is the optimizer's own.
        like: of kind ``DTENSOR``: how it lies on its mesh.
        extra: lies beside ``state`` and ``param_groups``; ``path`` is below the optimizer.
    """

    kind: Kind
    param: int | None
    name: str
    path: Path
    sources: dict[str, str]
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    pieces: dict[MetadataIndex, Piece | None] = field(default_factory=dict)
    filled: int = 0
    tensor: torch.Tensor | None = None
    in_place: bool = False
    like: Placed | None = None
    extra: bool = False


@dataclass
class LoadSchedule:
    """Everything that one rank reads for one optimizer or model.

    Attributes:
        items: the reads.
        leaves: the values that they make up.
        destinations: ``dest_index`` of a read of a tensor -> its value.
        mismatches: all that does not match.
        keep: parameters that are skipped because of one; their state stays as it is.
        skip: FQNs that are; others of the same flat parameter may be loaded.
    """

    items: list[ReadItem] = field(default_factory=list)
    leaves: list[Leaf] = field(default_factory=list)
    destinations: dict[MetadataIndex, Leaf] = field(default_factory=dict)
    mismatches: list[Mismatch] = field(default_factory=list)
    keep: set[int] = field(default_factory=set)
    skip: set[str] = field(default_factory=set)

    def add_objects(
        self, param: int | None, name: str, path: Path, sources: dict[str, str]
    ) -> Leaf:
        """Read what is no tensor."""
        leaf = Leaf(Kind.OBJECT, param, name, path, sources)
        self.leaves.append(leaf)
        self.items += map(object_item, sources.values())
        return leaf

    def add_tensor(
        self,
        leaf: Leaf,
        storage: TensorStorageMetadata,
        wanted: Sequence[Want] = (),
        *,
        shape: tuple[int, ...] | None = None,
    ) -> Leaf:
        """Load a tensor: read ``wanted`` of its only source, or nothing yet (see :meth:`read`).

        ``shape``: of the local tensor, if not that of the saved one.
        """
        leaf.shape = tuple(storage.size) if shape is None else shape
        leaf.dtype = storage.properties.dtype
        self.leaves.append(leaf)
        if wanted:
            (key,) = leaf.sources.values()
            self.read(leaf, key, storage, wanted)
        return leaf

    def read(
        self, leaf: Leaf, key: str, storage: TensorStorageMetadata, wanted: Sequence[Want]
    ) -> None:
        """Read boxes of a saved tensor; the saved boxes must cover them."""
        items = _covering_reads(key, storage, [chunk for _, chunk in wanted])
        for piece, chunk in wanted:
            index = MetadataIndex(key, chunk.offsets)
            if index in self.destinations:
                raise CheckpointMismatchError(f"{key}: wanted for two values of the optimizer")
            leaf.pieces[index] = piece
            self.destinations[index] = leaf
        leaf.filled += sum(item.lengths.numel() for item in items)
        self.items += items

    def join(self, other: LoadSchedule) -> None:
        """Take over what ``other`` reads."""
        for index in other.destinations.keys() & self.destinations.keys():
            raise CheckpointMismatchError(f"{index.fqn}: wanted for two values of the optimizer")
        self.items += other.items
        self.leaves += other.leaves
        self.destinations.update(other.destinations)

    def clear(self) -> None:
        """Let go of all tensors."""
        self.leaves.clear()
        self.destinations.clear()


def _covering_reads(
    key: str, storage: TensorStorageMetadata, chunks: list[ChunkStorageMetadata]
) -> list[ReadItem]:
    """The reads that fill ``chunks`` of a saved tensor.

    Raises:
        CorruptCheckpointError: the saved chunks do not hold each of their elements once.
    """
    if len(storage.chunks) < MANY:
        items: list[ReadItem] = create_read_items_for_chunk_list(key, storage, chunks)
    else:
        table = chunk_table(storage)
        items = [
            item
            for number, chunk in enumerate(chunks)
            for item in _reads(MetadataIndex(key, chunk.offsets, number), table, chunk)
        ]
    need = sum(chunk.sizes.numel() for chunk in chunks)
    have = sum(item.lengths.numel() for item in items)
    if need != have:
        reason = "a part was never saved" if have < need else "saved parts overlap"
        raise CorruptCheckpointError(
            f"{key}: expected the checkpoint to hold all elements of {tuple(storage.size)} "
            f"once, found {have} for the {need} that this rank needs: {reason}"
        )
    return items


def _reads(
    index: MetadataIndex, table: ChunkTable, chunk: ChunkStorageMetadata
) -> Iterator[ReadItem]:
    """As ``create_read_items_for_chunk_list``, without a look at each of many saved boxes."""
    for found in table.overlapping(chunk.offsets, chunk.sizes):
        yield ReadItem(
            type=LoadItemType.TENSOR,
            dest_index=index,
            dest_offsets=_minus(found.offsets, chunk.offsets),
            storage_index=MetadataIndex(index.fqn, found.saved, found.number),
            storage_offsets=_minus(found.offsets, found.saved),
            lengths=torch.Size(found.sizes),
        )


def _minus(offsets: Sequence[int], origin: Sequence[int]) -> torch.Size:
    return torch.Size(a - b for a, b in zip(offsets, origin, strict=True))


def chunk_of(offsets: Iterable[int], sizes: Iterable[int]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def whole_chunk(storage: TensorStorageMetadata) -> ChunkStorageMetadata:
    return chunk_of([0] * len(storage.size), storage.size)


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
