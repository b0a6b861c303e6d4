"""``.metadata`` in and out: the checkpoint's table of contents and its commit marker.

The file is what stock DCP writes, a pickle of ``torch.distributed.checkpoint.metadata.Metadata``
whose ``storage_data`` maps each index to a ``_StorageInfo(relative_path, offset, length)``.  What
we add rides where stock ignores it, as plain tuples, strings and ints:

- attribute ``dcp_fsdp_osd`` of each ``_StorageInfo``: ``(kind, ...)``, see :class:`EntryInfo`;
- attribute ``dcp_fsdp_osd`` of the ``Metadata``: ``{"format": 1, "byteorder": "little" or "big",
  "checksum": name or None, "files": {relative_path: size}}``;
- after the pickle's STOP, where ``pickle.load`` stops reading: a seal of 8 bytes magic, the CRC-32
  of all bytes before the seal, and their count.

A pickle can run code.  Reading one here runs none: ``dcp_pickle.py`` knows the classes of DCP's
metadata and refuses any other.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import struct
import sys
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_fsdp_osd.compact import no_collections
from dcp_fsdp_osd.compat import reduce_properties
from dcp_fsdp_osd.errors import CorruptCheckpointError, UnsafeCheckpointError
from dcp_fsdp_osd.storage.cover import check_chunks, check_entries
from dcp_fsdp_osd.storage.dcp_pickle import check_nesting, load_dcp_pickle
from dcp_fsdp_osd.storage.pickles import PickleError
from dcp_fsdp_osd.storage.store import check_name

__all__ = [
    "KIND_BYTES",
    "KIND_OPAQUE",
    "KIND_TENSOR",
    "MAX_METADATA_BYTES",
    "EntryInfo",
    "check_ends",
    "checksum_name",
    "dump_metadata",
    "entry_info",
    "fill_metadata",
    "load_metadata",
    "metadata_name",
    "storage_info",
]

MAX_METADATA_BYTES = 8 << 30
HEAD_BYTES, TAIL_BYTES = 2, 20
"""What :func:`check_ends` looks at."""
_ATTRIBUTE = "dcp_fsdp_osd"
_SEAL = struct.Struct("<8sIQ")
_MAGIC = b"\nDCPOSD1"

KIND_BYTES = 0
"""The entry is the bytes of a BYTE_IO item as the planner gave them."""
KIND_TENSOR = 1
"""The entry is one of ``entry.py``."""
KIND_OPAQUE = 2
"""The entry is ``torch.save`` of a tensor that is more than its elements' bytes."""


def metadata_name(rank: int | None = None) -> str:
    """``.metadata``, or that of one rank where DCP saves without collectives."""
    return ".metadata" if rank is None else f"__{rank}.metadata"


@dataclass(frozen=True)
class EntryInfo:
    """Where an entry lies, and what we know about it beyond what stock DCP does.

    Attributes:
        name: the file, relative to the checkpoint.
        offset, length: of the entry in the file, in bytes.
        kind: one of the KIND_ constants; None for an entry that stock DCP wrote.
        crc: of the whole entry, or for KIND_TENSOR of its trailer; None where not checksummed.
        payload, nbytes, dtype: KIND_TENSOR only: offset of the payload in the entry, its length,
            and the name of the dtype.
    """

    name: str
    offset: int
    length: int
    kind: int | None = None
    crc: int | None = None
    payload: int = 0
    nbytes: int = 0
    dtype: str = ""


def storage_info(entry: EntryInfo) -> _StorageInfo:
    """`entry` as the value in ``Metadata.storage_data``."""
    info = _StorageInfo(entry.name, entry.offset, entry.length)
    extra: tuple[Any, ...] = (entry.kind, entry.crc)
    if entry.kind == KIND_TENSOR:
        extra += (entry.payload, entry.nbytes, entry.dtype)
    setattr(info, _ATTRIBUTE, extra)
    return info


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def entry_info(info: object, what: str, names: set[str]) -> EntryInfo:
    """The value in ``Metadata.storage_data`` as an :class:`EntryInfo`; nothing of it is trusted.

    `names` are those of files that were checked before; it is added to.

    Raises:
        UnsafeCheckpointError: the file lies outside of the checkpoint.
        CorruptCheckpointError: the values make no entry.
    """
    if not isinstance(info, _StorageInfo):
        raise CorruptCheckpointError(
            f"{what}: expected a _StorageInfo in the metadata's storage_data, found "
            f"{type(info).__name__}. Checkpoints of other storage writers are not read."
        )
    fields = vars(info)
    name = fields.get("relative_path")
    if type(name) is not str or name not in names:
        names.add(name := check_name(name))
    offset, length = fields.get("offset"), fields.get("length")
    if fields.get("transform_descriptors"):
        raise CorruptCheckpointError(
            f"{what}: the entry was written through stream transforms "
            f"{fields['transform_descriptors']!r}, which are not supported; read it with "
            "torch.distributed.checkpoint.FileSystemReader"
        )
    if not (_is_count(offset) and _is_count(length)):
        raise CorruptCheckpointError(
            f"{what}: {name} offset {offset!r} length {length!r}: expected byte counts"
        )
    assert isinstance(offset, int) and isinstance(length, int)  # for the type checker
    extra = fields.get(_ATTRIBUTE)
    if extra is None:
        return EntryInfo(name, offset, length)
    match extra:
        case (0 | 2 as kind, crc) if crc is None or _is_count(crc):
            return EntryInfo(name, offset, length, kind, crc)
        case (1, crc, payload, nbytes, str(dtype)) if (
            (crc is None or _is_count(crc))
            and _is_count(payload)
            and _is_count(nbytes)
            and payload + nbytes < length
        ):
            return EntryInfo(name, offset, length, KIND_TENSOR, crc, payload, nbytes, dtype)
    raise CorruptCheckpointError(f"{what}: {name}: {extra!r} describes no entry")


def fill_metadata(
    metadata: Metadata, entries: Iterable[tuple[MetadataIndex, EntryInfo]], checksum: str | None
) -> dict[str, int]:
    """Put what all ranks have written into `metadata`, in place; the size of each file."""
    files: dict[str, int] = {}
    metadata.storage_data = {}
    for index, entry in entries:
        metadata.storage_data[index] = storage_info(entry)
        end = entry.offset + entry.length
        files[entry.name] = max(files.get(entry.name, 0), end)
    _share_sizes(metadata)
    ours = {"format": 1, "byteorder": sys.byteorder, "checksum": checksum, "files": files}
    setattr(metadata, _ATTRIBUTE, ours)
    return files


def _share_sizes(metadata: Metadata) -> None:
    """One object for all equal offsets and sizes: a third less to write, and to read."""
    known: dict[torch.Size, torch.Size] = {}
    for stored in metadata.state_dict_metadata.values():
        if isinstance(stored, TensorStorageMetadata):
            stored.size = known.setdefault(stored.size, stored.size)
            for chunk in stored.chunks:
                _share(chunk, "offsets", known)
                _share(chunk, "sizes", known)
    for index in metadata.storage_data:
        _share(index, "offset", known)


def _share(holder: object, name: str, known: dict[torch.Size, torch.Size]) -> None:
    value = getattr(holder, name)
    if type(value) is torch.Size and (shared := known.setdefault(value, value)) is not value:
        object.__setattr__(holder, name, shared)  # equal; it may be of a frozen class


def checksum_name(metadata: Metadata) -> str | None:
    """The algorithm of the checkpoint's checksums; None where it has none (stock, or turned off).

    Raises:
        CorruptCheckpointError: it was written by a later version of this format, or on a machine
            of other byte order.
    """
    ours = vars(metadata).get(_ATTRIBUTE)
    if ours is None:
        return None
    if not isinstance(ours, Mapping) or ours.get("format") != 1:
        found = ours.get("format") if isinstance(ours, Mapping) else ours
        raise CorruptCheckpointError(
            f"the checkpoint's format is {found!r}, this version of dcp-fsdp-osd reads format 1; "
            "upgrade it, or read with torch.distributed.checkpoint.FileSystemReader"
        )
    if ours.get("byteorder") != sys.byteorder:
        raise CorruptCheckpointError(
            f"the checkpoint's byte order is {ours.get('byteorder')!r}, this machine's "
            f"{sys.byteorder!r}; read with torch.distributed.checkpoint.FileSystemReader"
        )
    name = ours.get("checksum")
    if name is not None and not isinstance(name, str):
        raise CorruptCheckpointError(f"checksum algorithm {name!r} in the metadata is no name")
    return name


def dump_metadata(metadata: Metadata) -> bytes:
    """The bytes of a ``.metadata`` file."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=4)
    pickler.dispatch_table = {**copyreg.dispatch_table, TensorProperties: reduce_properties}
    pickler.dump(metadata)
    data = buffer.getvalue()
    return data + _SEAL.pack(_MAGIC, zlib.crc32(data), len(data))


def check_ends(head: bytes, tail: bytes, size: int, what: str) -> None:
    """Refuse a file of `size` bytes that is no metadata by its first and last bytes alone.

    Raises:
        CorruptCheckpointError: it begins or ends as no metadata do.
    """
    sealed = tail.startswith(_MAGIC) and _SEAL.unpack(tail)[2] == size - _SEAL.size
    begun = head[0] == 0x80 and head[1] <= pickle.HIGHEST_PROTOCOL
    if not begun or not (sealed or tail[-1:] == b"."):
        raise CorruptCheckpointError(
            f"{what}: {size} bytes that begin with {head!r} and end with {tail!r}: expected a "
            "pickle, and its end or a seal. The file was altered or cut off; load another "
            "checkpoint."
        )


def load_metadata(
    data: bytes, what: str, *, allow_pickle: bool = False, rank: int | None = None
) -> Metadata:
    """The metadata in the bytes of a ``.metadata`` file, ours or stock's; `rank`'s own if given.

    Raises:
        CorruptCheckpointError: the seal does not match, the pickle is broken, or what it describes
            is no checkpoint: each tensor's chunks have to fill it, no two entries lie in one place.
        UnsafeCheckpointError: the pickle wants a class that is not DCP metadata's, and not
            `allow_pickle`.
    """
    with no_collections():
        return _load_metadata(data, what, allow_pickle=allow_pickle, rank=rank)


def _load_metadata(data: bytes, what: str, *, allow_pickle: bool, rank: int | None) -> Metadata:
    sealed = data[-_SEAL.size :]
    body = len(data)
    if sealed.startswith(_MAGIC) and len(sealed) == _SEAL.size:
        _, crc, size = _SEAL.unpack(sealed)
        body -= _SEAL.size
        if size != body or zlib.crc32(memoryview(data)[:body]) != crc:
            raise CorruptCheckpointError(
                f"{what}: the checksum does not match its {len(data)} bytes; the file was altered "
                "or cut off"
            )
    try:
        if allow_pickle:
            stream = io.BytesIO(data)
            metadata = pickle.Unpickler(stream).load()
            end = stream.tell()
        else:
            metadata, end = load_dcp_pickle(data)
    except UnsafeCheckpointError as error:
        raise UnsafeCheckpointError(f"{what}: {error}") from None
    except Exception as error:
        raise CorruptCheckpointError(f"{what}: not a pickle of DCP metadata: {error}") from error
    if not isinstance(metadata, Metadata):
        raise CorruptCheckpointError(f"{what}: expected Metadata, found {type(metadata).__name__}")
    if end != body or (body == len(data) and _ATTRIBUTE in vars(metadata)):
        raise CorruptCheckpointError(
            f"{what}: expected {end} bytes of pickle"
            f"{' and a seal' if _ATTRIBUTE in vars(metadata) else ''}, found {len(data)} bytes; "
            "the file was altered or cut off"
        )
    _check_shape(metadata, what, len(data), allow_pickle=allow_pickle)
    try:
        check_chunks(metadata, whole=rank is None)
        if body == len(data):  # no checksum covers them
            check_entries(metadata.storage_data)
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"{what}: {error}") from None
    return metadata


def _check_shape(metadata: Metadata, what: str, size: int, *, allow_pickle: bool) -> None:
    """Refuse metadata whose parts are not of the types that all later code relies on."""
    fields = vars(metadata)
    contents, entries = fields.get("state_dict_metadata"), fields.get("storage_data")
    if not isinstance(contents, dict) or not all(isinstance(key, str) for key in contents):
        raise CorruptCheckpointError(f"{what}: state_dict_metadata is no dict of names")
    if not isinstance(entries, dict) or not all(isinstance(k, MetadataIndex) for k in entries):
        raise CorruptCheckpointError(f"{what}: storage_data is no dict of entries")
    if allow_pickle:
        return
    try:
        for name, value in fields.items():
            if name not in ("state_dict_metadata", "storage_data", "storage_meta"):
                check_nesting(value, 16 * size)
    except PickleError as error:
        raise CorruptCheckpointError(f"{what}: not a pickle of DCP metadata: {error}") from None
