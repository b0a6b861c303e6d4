"""What each rank tells the coordinator of the entries it has written: columns, compressed.

DCP gathers a rank's ``list[WriteResult]`` and gives all of them to ``StorageWriter.finish``. An
object per entry is 200 bytes there, and its names and offsets repeat: columns are a tenth of it.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Iterable, Sequence

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from dcp_fsdp_osd.compact import packed, unpacked
from dcp_fsdp_osd.storage.places import EntryInfo, WrittenPlaces

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

    def add_to(self, written: WrittenPlaces, sizes: dict[tuple[int, ...], torch.Size]) -> None:
        """`sizes` are offsets that other ranks had: most repeat in each tensor."""
        offsets: list[torch.Size | None] = []
        position, every = 0, self.offsets.tolist()
        for dims in self.dims:
            if dims == _NONE:
                offsets.append(None)
                continue
            offset = tuple(every[position : position + dims])
            position += dims
            known = sizes.get(offset)
            if known is None:
                known = sizes[offset] = torch.Size(offset)
            offsets.append(known)
        infos = zip(
            self.files, self.starts, self.lengths, _or_none(self.kinds), _or_none(self.crcs),
            self.payloads, self.nbytes, self.dtypes, strict=True,
        )  # fmt: skip
        written.extend(
            list(zip(self.names, offsets, strict=True)),
            _or_none(self.hints),
            list(map(EntryInfo._make, infos)),
        )


def _or_none(values: array[int]) -> list[int | None]:
    found: list[int | None] = values.tolist()  # type: ignore[assignment]
    return [None if each == _NONE else each for each in found] if _NONE in found else found


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
) -> tuple[WrittenPlaces, set[str | None]]:
    """The entries of all ranks, rank by rank, and the names of the checksums that they used."""
    written = WrittenPlaces()
    sizes: dict[tuple[int, ...], torch.Size] = {}
    used: set[str | None] = set()
    for result in (result for of_rank in results for result in of_rank):
        sent: _Packed = result.storage_data
        used.add(sent.checksum)
        columns: _Columns = unpacked(sent.columns)
        columns.add_to(written, sizes)
    return written, used
