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

import io
import pickle
import struct
import sys
import zlib
from collections.abc import Iterable, Mapping

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from dcp_fsdp_osd.compact import no_collections
from dcp_fsdp_osd.errors import CorruptCheckpointError, UnsafeCheckpointError
from dcp_fsdp_osd.storage.cover import check_chunks, check_entries
from dcp_fsdp_osd.storage.dcp_pickle import check_nesting, load_dcp_pickle
from dcp_fsdp_osd.storage.dump import INDEX, SUFFIX, dump_pickle
from dcp_fsdp_osd.storage.index import FOOTER_BYTES, index_of, read_footer, unpack_index
from dcp_fsdp_osd.storage.indexed import indexed
from dcp_fsdp_osd.storage.pickles import PickleError
from dcp_fsdp_osd.storage.places import (
    ATTRIBUTE,
    KIND_BYTES,
    KIND_OPAQUE,
    KIND_TENSOR,
    EntryInfo,
    WrittenPlaces,
    entry_info,
    storage_info,
)

__all__ = [
    "FOOT_BYTES",
    "HEAD_BYTES",
    "KIND_BYTES",
    "KIND_OPAQUE",
    "KIND_TENSOR",
    "MAX_METADATA_BYTES",
    "TAIL_BYTES",
    "EntryInfo",
    "check_ends",
    "checksum_name",
    "dump_metadata",
    "entry_info",
    "fill_metadata",
    "index_start",
    "load_index",
    "load_metadata",
    "metadata_name",
    "storage_info",
]

MAX_METADATA_BYTES = 8 << 30
HEAD_BYTES, TAIL_BYTES = 2, 20
"""What :func:`check_ends` looks at."""
FOOT_BYTES = TAIL_BYTES + len(SUFFIX) + FOOTER_BYTES
"""What :func:`index_start` looks at, at least."""
_SEAL = struct.Struct("<8sIQ")
_MAGIC = b"\nDCPOSD1"


def metadata_name(rank: int | None = None) -> str:
    """``.metadata``, or that of one rank where DCP saves without collectives."""
    return ".metadata" if rank is None else f"__{rank}.metadata"


def fill_metadata(
    metadata: Metadata,
    written: WrittenPlaces | Iterable[tuple[MetadataIndex, EntryInfo]],
    checksum: str | None,
) -> dict[str, int]:
    """Put what all ranks have written into `metadata`, in place; the size of each file."""
    places = written if isinstance(written, WrittenPlaces) else WrittenPlaces(written)
    files = places.files
    metadata.storage_data = places
    ours = {"format": 1, "byteorder": sys.byteorder, "checksum": checksum, "files": files}
    setattr(metadata, ATTRIBUTE, ours)
    return files


def checksum_name(metadata: Metadata) -> str | None:
    """The algorithm of the checkpoint's checksums; None where it has none (stock, or turned off).

    Raises:
        CorruptCheckpointError: it was written by a later version of this format, or on a machine
            of other byte order.
    """
    ours = vars(metadata).get(ATTRIBUTE)
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
    """The bytes of a ``.metadata`` file, with an index where there are many boxes."""
    with no_collections():
        data = dump_pickle(metadata, index_of(metadata))
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
    ours = vars(metadata).get(ATTRIBUTE)
    if end != body or (body == len(data) and ours is not None):
        raise CorruptCheckpointError(
            f"{what}: expected {end} bytes of pickle"
            f"{' and a seal' if ours is not None else ''}, found {len(data)} bytes; "
            "the file was altered or cut off"
        )
    if isinstance(ours, dict):
        ours.pop(INDEX, None)
    _check_shape(metadata, what, len(data), allow_pickle=allow_pickle)
    try:
        check_chunks(metadata, whole=rank is None)
        if body == len(data):  # no checksum covers them
            check_entries(metadata.storage_data)
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"{what}: {error}") from None
    return metadata


def index_start(tail: bytes, size: int, what: str) -> int | None:
    """Where the index of a file of `size` bytes begins, by its last :data:`FOOT_BYTES` or more;
    None if it has none.

    Raises:
        CorruptCheckpointError: what is there is none.
    """
    seal = tail[-_SEAL.size :]
    rest = size - _SEAL.size
    if not seal.startswith(_MAGIC) or _SEAL.unpack(seal)[2] != rest or sys.byteorder != "little":
        return None
    try:
        footer = read_footer(tail[: -_SEAL.size], rest)
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"{what}: {error}") from None
    return None if footer is None else footer.start


def load_index(data: bytes, size: int, what: str, *, rank: int | None = None) -> Metadata:
    """The metadata in a file of `size` bytes by the last of them, from :func:`index_start` on.

    What :func:`load_metadata` gives, but that boxes and entries are decoded when they are asked
    for, which may raise CorruptCheckpointError.  The bytes of the index are checked; those before
    it are not, and are not needed.

    Raises:
        CorruptCheckpointError, UnsafeCheckpointError: as :func:`load_metadata`.
    """
    with no_collections():
        tail = data[: -_SEAL.size]
        try:
            footer = read_footer(tail, size - _SEAL.size)
            if footer is None or footer.length + len(SUFFIX) != len(tail):
                raise CorruptCheckpointError("its index is not where it was; the file was altered")
            index = tail[: footer.length]
            head, names, blocks = unpack_index(index, footer)
            metadata, end = load_dcp_pickle(head)
            if not isinstance(metadata, Metadata) or end != len(head):
                raise CorruptCheckpointError("the head of its index is no Metadata")
            _check_shape(metadata, what, len(head), allow_pickle=False)
            indexed(metadata, names, blocks, what, whole=rank is None, most=footer.start)
        except UnsafeCheckpointError as error:
            raise UnsafeCheckpointError(f"{what}: {error}") from None
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(f"{what}: {error}") from None
        except PickleError as error:
            raise CorruptCheckpointError(f"{what}: the head of its index: {error}") from None
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
