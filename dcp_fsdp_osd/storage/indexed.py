"""The metadata of an index: an ordinary ``Metadata``, whose boxes and entries are decoded when they
are asked for, some hundreds at a time.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from dcp_fsdp_osd.errors import CorruptCheckpointError
from dcp_fsdp_osd.storage.chunks import MANY, ChunkTable
from dcp_fsdp_osd.storage.cover import chunks_problem
from dcp_fsdp_osd.storage.index import ENTRY, KIND, NONE, inflated, numbers_of
from dcp_fsdp_osd.storage.memory import DTYPE_NAMES
from dcp_fsdp_osd.storage.places import (
    ATTRIBUTE,
    KIND_BYTES,
    KIND_OPAQUE,
    KIND_TENSOR,
    EntryInfo,
    Places,
)
from dcp_fsdp_osd.storage.store import check_name

__all__ = ["indexed"]

_LIMIT = 1 << 62
_PER_BOX = 40  # a box's bytes in the pickle beside the index, at least


def indexed(
    metadata: Metadata, names: list[str], blocks: bytes, what: str, *, whole: bool, most: int
) -> None:
    """Give the head of an index, read as `metadata`, its boxes and entries; decoded when wanted.

    Args:
        what: the file, for errors.
        whole: the boxes are those of all ranks, and fill their tensors.
        most: bytes of the pickle that has the same boxes.

    Raises:
        CorruptCheckpointError: they are no index.
    """
    _Boxes(metadata, names, blocks, what, whole=whole, most=most)


class _Boxes:
    """Decodes blocks, each once."""

    def __init__(
        self,
        metadata: Metadata,
        names: list[str],
        blocks: bytes,
        what: str,
        *,
        whole: bool,
        most: int,
    ) -> None:
        self._what, self._whole, self._data = what, whole, blocks
        ours = vars(metadata).get(ATTRIBUTE)
        if not isinstance(ours, dict):
            raise self._error("it says nothing")
        rows, keys, about = (_int64s(ours, name) for name in ("tilings", "keys", "blocks"))
        stored = metadata.state_dict_metadata
        counts, lengths = about[::2], about[1::2]
        if (
            len(keys) != len(stored)
            or len(counts) != len(lengths)
            or min((*rows, *about), default=0) < 0
            or not all(NONE <= tiling < len(rows) for tiling in keys)
            or sum(counts) != len(rows) + len(keys)
            or sum(lengths) != len(blocks)
        ):
            raise self._error("it is not the one of these keys")
        self.rows = [1 if tiling == NONE else rows[tiling] for tiling in keys]
        if sum(self.rows) * _PER_BOX > most or sum(rows) > sum(self.rows):
            raise self._error("it has more boxes than there are")
        self._starts = [0, *itertools.accumulate(counts)]
        self._ends = [0, *itertools.accumulate(lengths)]
        self._block_of = [n for n, count in enumerate(counts) for _ in range(count)]
        self._tables: dict[int, list[torch.Tensor]] = {}
        self._tilings: dict[int, ChunkTable] = {}
        self._first = len(rows)  # the table of the first key
        self._shapes = [(0, count) for count in rows] + [(ENTRY, n) for n in self.rows]
        for number, ((key, each), tiling) in enumerate(zip(stored.items(), keys, strict=True)):
            tensor = isinstance(each, TensorStorageMetadata)
            if tensor is (tiling == NONE):
                raise self._error(f"{key} is no tensor, or one without boxes")
            if isinstance(each, TensorStorageMetadata):
                size = tuple(each.size)
                self._shapes[tiling] = 2 * len(size), rows[tiling]
                vars(each)["chunks"] = _IndexedChunks(self, number, tiling, key, size)
        metadata.storage_data = _IndexedPlaces(self, stored, names)
        for name in ("tilings", "keys", "blocks"):
            del ours[name]

    def _error(self, problem: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            f"{self._what}: its index: {problem}. The file was altered; load another checkpoint."
        )

    def _table(self, number: int) -> torch.Tensor:
        """Of shape (columns, rows)."""
        block = self._block_of[number]
        if block not in self._tables:
            try:
                self._tables[block] = self._decode(block)
            except CorruptCheckpointError as error:
                raise self._error(str(error)) from None
        return self._tables[block][number - self._starts[block]]

    def _decode(self, block: int) -> list[torch.Tensor]:
        tables = range(self._starts[block], self._starts[block + 1])
        shapes = self._shapes[tables.start : tables.stop]
        counts = [height * width for height, width in shapes]
        packed = memoryview(self._data)[self._ends[block] : self._ends[block + 1]]
        parts = torch.split(numbers_of(inflated(packed, 8 * sum(counts))), counts)
        found = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        for number, table in zip(tables, found, strict=True):
            lines = len(table) if number < self._first else ENTRY - 1
            table[:lines] = table[:lines].cumsum(1)
        return found

    def entries(self, number: int) -> torch.Tensor:
        """The numbers of the entries of a key, of shape (columns, rows)."""
        return self._table(self._first + number)

    def tiling(self, number: int, key: str, size: tuple[int, ...]) -> ChunkTable:
        """The boxes of a tensor, which fill it without overlap."""
        known = self._tilings.get(number)
        if known is None:
            table = self._table(number)
            dims = len(size)
            if len(table) != 2 * dims:
                raise self._error(f"{key}: boxes of other than {dims} dimensions")
            try:
                known = ChunkTable(size, table[:dims], table[dims:])
            except ValueError as error:
                raise self._error(f"{key}: {error}") from None
            if not known.tiles():
                problem = chunks_problem(size, known, whole=self._whole)
                if problem:
                    raise self._error(f"{key}: {problem}")
            self._tilings[number] = known
        if known.size != size:
            raise self._error(f"{key}: boxes of a tensor of sizes {known.size}, not {size}")
        return known


def _int64s(ours: Mapping[str, Any], name: str) -> list[int]:
    data = ours.get(name)
    if type(data) is not bytes or len(data) % 8:
        raise CorruptCheckpointError(f"its index says nothing of {name}")
    return array("q", data).tolist()


class _IndexedChunks(ChunkTable):
    def __init__(
        self, boxes: _Boxes, number: int, tiling: int, key: str, size: tuple[int, ...]
    ) -> None:
        self._boxes, self._number, self._of = boxes, number, (tiling, key, size)
        self.size = size

    @property
    def known(self) -> ChunkTable:
        return self._boxes.tiling(*self._of)

    def __len__(self) -> int:
        return self._boxes.rows[self._number]


class _IndexedPlaces(Places):
    def __init__(self, boxes: _Boxes, stored: Mapping[str, Any], names: list[str]) -> None:
        self._boxes, self._names = boxes, names
        self._checked: set[int] = set()
        # Whatever becomes of the metadata that these are part of.
        self._keys = {
            key: (number, getattr(each, "chunks", None), _dtype_name(each))
            for number, (key, each) in enumerate(stored.items())
        }

    def entry(self, index: MetadataIndex) -> EntryInfo | None:
        number, chunks, dtype = self._keys.get(index.fqn, (NONE, None, ""))
        if number == NONE or (chunks is None) is not (index.offset is None):
            return None
        row = 0 if chunks is None else chunks.find(index.offset, index.index)
        if row is None:
            return None
        values: list[int] = self._boxes.entries(number)[:, row].tolist()
        file, offset, length, kind, payload, nbytes, crc = values
        if (
            not 0 <= file < len(self._names)
            or not all(0 <= value < _LIMIT for value in (offset, length, payload, nbytes, crc + 1))
            or kind not in (KIND_BYTES, KIND_TENSOR, KIND_OPAQUE)
            or (kind == KIND_TENSOR and payload + nbytes >= length)
        ):
            raise CorruptCheckpointError(f"{index.fqn}: {values} describe no entry")
        name = self._names[file]
        self._check((file,))
        known = None if crc == NONE else crc
        if kind != KIND_TENSOR:
            return EntryInfo(name, offset, length, kind, known)
        return EntryInfo(name, offset, length, kind, known, payload, nbytes, dtype)

    def located(
        self, fqn: str, offsets: Sequence[tuple[int, ...] | None]
    ) -> list[tuple[str, int] | None]:
        number, chunks, _ = self._keys.get(fqn, (NONE, None, ""))
        if len(offsets) < MANY or number == NONE or chunks is None:
            return super().located(fqn, offsets)
        rows = list(map(chunks.known.by_offsets.get, offsets))
        if None in rows:
            return super().located(fqn, offsets)
        found = self._boxes.entries(number)[:, torch.tensor(rows)]
        file, at, length, kind, payload, nbytes, crc = found
        counts = torch.stack((at, length, payload, nbytes, crc + 1))
        tensors = kind == KIND_TENSOR
        known = tensors | (kind == KIND_BYTES) | (kind == KIND_OPAQUE)
        bad = (
            ~known
            | (file < 0)
            | (file >= len(self._names))
            | (tensors & (payload + nbytes >= length))
        )
        if bad.any() or (counts < 0).any() or (counts >= _LIMIT).any():
            return super().located(fqn, offsets)  # which has the words for it
        files = file.tolist()
        self._check(files)
        return list(zip(map(self._names.__getitem__, files), at.tolist(), strict=True))

    def _check(self, files: Iterable[int]) -> None:
        for file in set(files) - self._checked:
            check_name(self._names[file])
            self._checked.add(file)

    def holds(self, fqn: str, kind: int) -> bool:
        number = self._keys.get(fqn, (NONE, None, ""))[0]
        return number != NONE and bool((self._boxes.entries(number)[KIND] == kind).any())

    def names(self) -> Iterable[str]:
        return self._names

    def __iter__(self) -> Iterator[MetadataIndex]:
        for key, (_, chunks, _) in self._keys.items():
            if chunks is None:
                yield MetadataIndex(key)
            else:
                for number, chunk in enumerate(chunks):
                    yield MetadataIndex(key, chunk.offsets, number)

    def __len__(self) -> int:
        return sum(self._boxes.rows)


def _dtype_name(stored: Any) -> str:
    tensor = isinstance(stored, TensorStorageMetadata)
    return DTYPE_NAMES.get(stored.properties.dtype, "") if tensor else ""
