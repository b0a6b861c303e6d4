"""What each rank tells the coordinator of the entries it has written: columns, compressed.

DCP gathers a rank's ``list[WriteResult]`` and gives all of them to ``StorageWriter.finish``. An
object per entry is 200 bytes there, and its names and offsets repeat: columns are a tenth of it.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from dcp_fsdp_osd.compact import packed, unpacked
from dcp_fsdp_osd.storage.metadata import EntryInfo

__all__ = ["Entry", "pack_results", "unpack_results"]

Entry = tuple[MetadataIndex, EntryInfo]
_NONE = -1


@dataclasses.dataclass(frozen=True)
class _Columns:
    """Entries, column by column; -1 stands for None.

    Attributes:
        hints: ``MetadataIndex.index``.
        dims: of ``MetadataIndex.offset``.
        offsets: the elements of all of these, one after the other.
    """

    names: list[str]
    files: list[str]
    dtypes: list[str]
    hints: array[int]
    dims: array[int]
    offsets: array[int]
    kinds: array[int]
    crcs: array[int]
    starts: array[int]
    lengths: array[int]
    payloads: array[int]
    nbytes: array[int]

    @classmethod
    def of(cls, entries: Sequence[Entry]) -> _Columns:
        indices, infos = [index for index, _ in entries], [info for _, info in entries]
        sizes = [index.offset for index in indices]
        hints = [index.index for index in indices]
        kinds, crcs = [info.kind for info in infos], [info.crc for info in infos]
        return cls(
            [index.fqn for index in indices],
            [info.name for info in infos],
            [info.dtype for info in infos],
            array("q", [_NONE if hint is None else hint for hint in hints]),
            array("q", [_NONE if size is None else len(size) for size in sizes]),
            array("q", [at for size in sizes if size is not None for at in size]),
            array("q", [_NONE if kind is None else kind for kind in kinds]),
            array("q", [_NONE if crc is None else crc for crc in crcs]),
            array("q", [info.offset for info in infos]),
            array("q", [info.length for info in infos]),
            array("q", [info.payload for info in infos]),
            array("q", [info.nbytes for info in infos]),
        )

    def entries(self) -> Iterator[Entry]:
        position = 0
        for name, file, dtype, hint, dims, kind, crc, start, length, payload, nbytes in zip(
            self.names, self.files, self.dtypes, self.hints, self.dims, self.kinds, self.crcs,
            self.starts, self.lengths, self.payloads, self.nbytes, strict=True,
        ):  # fmt: skip
            offset = None
            if dims != _NONE:
                offset = torch.Size(self.offsets[position : position + dims])
                position += dims
            index = MetadataIndex(name, offset, None if hint == _NONE else hint)
            known = None if kind == _NONE else kind
            checksum = None if crc == _NONE else crc
            yield index, EntryInfo(file, start, length, known, checksum, payload, nbytes, dtype)


@dataclasses.dataclass(frozen=True)
class _Packed:
    """What travels: :class:`_Columns`, packed, and the name of the checksum."""

    checksum: str | None
    columns: bytes


def pack_results(entries: Sequence[Entry], checksum: str | None) -> list[WriteResult]:
    """The results of one rank, as one :class:`WriteResult` that stands for all of its entries."""
    if not entries:
        return []
    columns = packed(_Columns.of(entries))
    nbytes = sum(info.length for _, info in entries)
    return [WriteResult(MetadataIndex("entries"), nbytes, _Packed(checksum, columns))]


def unpack_results(
    results: Iterable[Iterable[WriteResult]],
) -> tuple[list[Entry], set[str | None]]:
    """The entries of all ranks, rank by rank, and the names of the checksums that they used."""
    entries: list[Entry] = []
    used: set[str | None] = set()
    for result in (result for of_rank in results for result in of_rank):
        sent: _Packed = result.storage_data
        used.add(sent.checksum)
        columns: _Columns = unpacked(sent.columns)
        entries.extend(columns.entries())
    return entries, used
