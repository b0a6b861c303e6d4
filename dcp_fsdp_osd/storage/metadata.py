"""``.metadata`` in and out: the checkpoint's table of contents and its commit marker.

The file is what stock DCP writes, a pickle of ``torch.distributed.checkpoint.metadata.Metadata``
whose ``storage_data`` maps each index to a ``_StorageInfo(relative_path, offset, length)``.  What
we add rides where stock ignores it, as plain tuples, strings and ints:

- attribute ``dcp_fsdp_osd`` of each ``_StorageInfo``: ``(kind, ...)``, see :class:`EntryInfo`;
- attribute ``dcp_fsdp_osd`` of the ``Metadata``: ``{"format": 1, "byteorder": "little" or "big",
  "checksum": name or None, "files": {relative_path: size}}``;
- after the pickle's STOP, where ``pickle.load`` stops reading: a seal of 8 bytes magic, the CRC-32
  of all bytes before the seal, and their count.

A pickle can run code.  Reading one here runs none: :class:`_MetadataUnpickler` knows the classes of
DCP's metadata and refuses any other.
"""

from __future__ import annotations

import io
import pathlib
import pickle
import struct
import sys
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.serialization
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from dcp_fsdp_osd.errors import CorruptCheckpointError, UnsafeCheckpointError
from dcp_fsdp_osd.storage.store import check_name

__all__ = [
    "KIND_BYTES",
    "KIND_OPAQUE",
    "KIND_TENSOR",
    "MAX_METADATA_BYTES",
    "EntryInfo",
    "checksum_name",
    "dump_metadata",
    "entry_info",
    "fill_metadata",
    "load_metadata",
    "metadata_name",
    "storage_info",
]

MAX_METADATA_BYTES = 8 << 30
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


def entry_info(info: object, what: str) -> EntryInfo:
    """The value in ``Metadata.storage_data`` as an :class:`EntryInfo`; nothing of it is trusted.

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
    name = check_name(fields.get("relative_path"))
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
    metadata: Metadata, results: Iterable[Iterable[WriteResult]], checksum: str | None
) -> dict[str, int]:
    """Put the write results of all ranks into `metadata`, in place; the size of each file."""
    entries = {}
    files: dict[str, int] = {}
    for result in (result for of_rank in results for result in of_rank):
        info = result.storage_data
        entries[result.index] = info
        end = info.offset + info.length
        files[info.relative_path] = max(files.get(info.relative_path, 0), end)
    metadata.storage_data = entries
    ours = {"format": 1, "byteorder": sys.byteorder, "checksum": checksum, "files": files}
    setattr(metadata, _ATTRIBUTE, ours)
    return files


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
    pickle.dump(metadata, buffer, protocol=4)
    data = buffer.getvalue()
    return data + _SEAL.pack(_MAGIC, zlib.crc32(data), len(data))


def load_metadata(data: bytes, what: str, *, allow_pickle: bool = False) -> Metadata:
    """The metadata in the bytes of a ``.metadata`` file, ours or stock's.

    Raises:
        CorruptCheckpointError: the seal does not match, or the pickle is broken.
        UnsafeCheckpointError: the pickle wants a class that is not DCP metadata's, and not
            `allow_pickle`.
    """
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
    stream = io.BytesIO(data)
    try:
        unpickler = pickle.Unpickler(stream) if allow_pickle else _MetadataUnpickler(stream)
        metadata = unpickler.load()
        end = stream.tell()
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
    _check_shape(metadata, what)
    return metadata


def _check_shape(metadata: Metadata, what: str) -> None:
    """Refuse metadata whose parts are not of the types that all later code relies on."""
    fields = vars(metadata)
    contents, entries = fields.get("state_dict_metadata"), fields.get("storage_data")
    if not isinstance(contents, dict) or not all(isinstance(key, str) for key in contents):
        raise CorruptCheckpointError(f"{what}: state_dict_metadata is no dict of names")
    if not isinstance(entries, dict) or not all(isinstance(k, MetadataIndex) for k in entries):
        raise CorruptCheckpointError(f"{what}: storage_data is no dict of entries")


def _get_layout(name: object) -> torch.layout:
    layout = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(layout, torch.layout):
        raise UnsafeCheckpointError(f"{name!r} is no torch.layout")
    return layout


def _allowed() -> dict[tuple[str, str], Any]:
    dcp = {
        name: getattr(dcp_metadata, name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    }
    allowed: dict[tuple[str, str], Any] = {
        ("torch.distributed.checkpoint.metadata", name): value for name, value in dcp.items()
    }
    allowed["torch.distributed.checkpoint.filesystem", "_StorageInfo"] = _StorageInfo
    allowed["torch.serialization", "_get_layout"] = _get_layout
    allowed["torch", "Size"] = torch.Size
    allowed["collections", "OrderedDict"] = OrderedDict
    for builtin in (set, frozenset, complex, bytearray, slice, range):
        allowed["builtins", builtin.__name__] = builtin
        allowed["__builtin__", builtin.__name__] = builtin  # pickle protocols 0 to 2
    # A checkpoint_id that was a Path; a pure path of the kind touches no file system.
    for module in ("pathlib", "pathlib._local"):
        for name in ("PosixPath", "PurePosixPath"):
            allowed[module, name] = pathlib.PurePosixPath
        for name in ("WindowsPath", "PureWindowsPath"):
            allowed[module, name] = pathlib.PureWindowsPath
    # Before torch 2.4 the properties were those of ShardedTensor.
    from torch.distributed._shard.sharded_tensor import metadata as sharded

    for name in ("MEM_FORMAT_ENCODING", "TensorProperties"):
        if hasattr(sharded, name):
            allowed["torch.distributed._shard.sharded_tensor.metadata", name] = getattr(
                sharded, name
            )
    return allowed


class _MetadataUnpickler(pickle.Unpickler):
    """Finds the classes of DCP metadata, torch's dtypes and plain containers, and no others."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self._allowed = _allowed()

    def find_class(self, module: str, name: str) -> Any:
        found = self._allowed.get((module, name))
        if found is None and module == "torch" and name.isidentifier():
            value = getattr(torch, name, None)
            if isinstance(value, torch.dtype):
                found = value
        if found is None:
            raise UnsafeCheckpointError(
                f"the pickle wants {module}.{name}, which is no part of DCP metadata. Loading it "
                "could run code: pass allow_pickle=True only if you trust where it comes from."
            )
        return found
