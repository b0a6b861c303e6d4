"""What each rank tells the coordinator of the entries it has written: columns, compressed.

DCP gathers a rank's ``list[WriteResult]`` and gives all of them to ``StorageWriter.finish``. An
object per entry is 200 bytes there, and its names and offsets repeat: columns are a tenth of it.
"""

from __future__ import annotations

import dataclasses
import pickle
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from dcp_fsdp_osd.storage.metadata import EntryInfo

__all__ = ["Entry", "pack_results", "unpack_results"]

Entry = tuple[MetadataIndex, EntryInfo]
_NUMBERS = ("offset", "length", "kind", "crc", "payload", "nbytes")
_NONE = -1


@dataclasses.dataclass(frozen=True)
class _Columns:
    """Entries, column by column; in ``hints``, ``dims`` and ``numbers``, -1 stands for None.

    Attributes:
        names, files, dtypes: of each entry.
        hints: ``MetadataIndex.index``.
        dims: of ``MetadataIndex.offset``.
        offsets: those of all entries, one after the other.
        numbers: of each of ``_NUMBERS`` one column.
    """

    names: list[str]
    files: list[str]
    dtypes: list[str]
    hints: array[int]
    dims: array[int]
    offsets: array[int]
    numbers: tuple[array[int], ...]

    @classmethod
    def of(cls, entries: Sequence[Entry]) -> _Columns:
        indices, infos = [index for index, _ in entries], [info for _, info in entries]
        return cls(
            [index.fqn for index in indices],
            [info.name for info in infos],
            [info.dtype for info in infos],
            _column(index.index for index in indices),
            _column(None if index.offset is None else len(index.offset) for index in indices),
            array("q", [at for index in indices for at in index.offset or ()]),
            tuple(_column(getattr(info, name) for info in infos) for name in _NUMBERS),
        )

    def entries(self) -> Iterator[Entry]:
        offsets = iter(self.offsets)
        rows = zip(self.names, self.hints, self.dims, self.files, self.dtypes, strict=True)
        for (name, hint, dims, file, dtype), numbers in zip(
            rows, zip(*self.numbers, strict=True), strict=True
        ):
            at = None if dims == _NONE else torch.Size([next(offsets) for _ in range(dims)])
            start, length, kind, crc, payload, nbytes = numbers
            yield (
                MetadataIndex(name, at, _or_none(hint)),
                EntryInfo(
                    file, start, length, _or_none(kind), _or_none(crc), payload, nbytes, dtype
                ),
            )


def _column(values: Iterable[int | None]) -> array[int]:
    return array("q", [_NONE if value is None else value for value in values])


def _or_none(value: int) -> int | None:
    return None if value == _NONE else value


@dataclasses.dataclass(frozen=True)
class _Packed:
    """What travels: :class:`_Columns`, pickled and compressed, and the name of the checksum."""

    checksum: str | None
    columns: bytes


def pack_results(entries: Sequence[Entry], checksum: str | None) -> list[WriteResult]:
    """The results of one rank, as one :class:`WriteResult` that stands for all of its entries."""
    if not entries:
        return []
    # Level 1: 2.6 KB of 198 entries' 16 KB; more effort gains nothing.
    columns = zlib.compress(pickle.dumps(_Columns.of(entries), protocol=5), 1)
    nbytes = sum(info.length for _, info in entries)
    return [WriteResult(MetadataIndex("entries"), nbytes, _Packed(checksum, columns))]


def unpack_results(
    results: Iterable[Iterable[WriteResult]],
) -> tuple[list[Entry], set[str | None]]:
    """The entries of all ranks, rank by rank, and the names of the checksums that they used."""
    entries: list[Entry] = []
    used: set[str | None] = set()
    for result in (result for of_rank in results for result in of_rank):
        packed: _Packed = result.storage_data
        used.add(packed.checksum)
        columns: _Columns = pickle.loads(zlib.decompress(packed.columns))
        entries.extend(columns.entries())
    return entries, used
