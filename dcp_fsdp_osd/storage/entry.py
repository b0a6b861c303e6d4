"""One item's bytes in a file: the ``torch.save`` zip around a tensor's raw payload.

`torch.load` and stock DCP readers read an entry as any file of ``torch.save``; we address its
payload directly.  An entry is written without copying the payload and without the zip's CRC-32 of
it (stored as 0; `torch.load` does not look at it, ``unzip -t`` does)::

    header   local headers and data of archive/data.pkl and archive/byteorder, then the local
             header of archive/data/0, padded so that the payload is 64-byte aligned in the file
    payload  the elements, row-major, little-endian
    trailer  archive/.dcp_fsdp_osd/crc (the block table), archive/version, the zip's directory

The block table is little-endian uint32: the checksum of the header, then that of each block of the
payload.  A checksum of the trailer itself is kept in ``.metadata``, so one chain covers each byte
of the entry: metadata -> trailer -> header and blocks.  A read of the whole entry checks all of it;
a read of a part checks the trailer and the blocks that it touches.

All functions are pure.  Formats: PKWARE APPNOTE 6.3 (zip), pickle protocol 2; what it replaces is
``torch.save`` / ``torch.load`` of one tensor.
"""

from __future__ import annotations

import math
import struct
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dcp_fsdp_osd.errors import CorruptCheckpointError

__all__ = [
    "ALIGNMENT",
    "MAX32",
    "STORAGE_CLASS",
    "Envelopes",
    "block_size",
    "contiguous_strides",
    "table_bytes",
    "tensor_header",
    "tensor_trailer",
    "unpack_table",
]

ALIGNMENT = 64
_TABLE_NAME = b"archive/.dcp_fsdp_osd/crc"
_PAYLOAD_NAME = b"archive/data/0"
_BYTEORDER = sys.byteorder.encode()
_UTF8 = 0x0800
_MOST_KNOWN = 1 << 10
MAX32 = 0xFFFFFFFF
LOCAL, CENTRAL, END = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"
END64, LOCATOR64 = b"PK\x06\x06", b"PK\x06\x07"

# torch.save names dtypes that are older than UntypedStorage by a storage class, others by dtype.
STORAGE_CLASS = {
    "bfloat16": "BFloat16Storage",
    "bool": "BoolStorage",
    "complex128": "ComplexDoubleStorage",
    "complex64": "ComplexFloatStorage",
    "float16": "HalfStorage",
    "float32": "FloatStorage",
    "float64": "DoubleStorage",
    "int16": "ShortStorage",
    "int32": "IntStorage",
    "int64": "LongStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
}


def block_size(nbytes: int) -> int:
    """Bytes of one checksum block in a payload of `nbytes`: a power of two, 16 KiB to 1 MiB.

    About 1/256 of the payload: a read that begins or ends inside an entry reads at most one block
    more at each such end, so splitting an entry costs under 0.4 % of it, and the table 0.025 %.
    """
    wanted = max(nbytes >> 8, 1 << 14)
    return min(1 << (wanted.bit_length() - 1), 1 << 20)


def contiguous_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides in elements, as torch computes them."""
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _pickled_int(value: int) -> bytes:
    if 0 <= value < 1 << 8:
        return b"K" + struct.pack("<B", value)
    if 0 <= value < 1 << 16:
        return b"M" + struct.pack("<H", value)
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + struct.pack("<B", len(raw)) + raw


def _pickled_tuple(values: Sequence[int]) -> bytes:
    body = b"".join(map(_pickled_int, values))
    if len(values) <= 3:
        return body + (b")", b"\x85", b"\x86", b"\x87")[len(values)]
    return b"(" + body + b"t"


def _pickled_text(text: str) -> bytes:
    raw = text.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def _tensor_pickle(dtype: str, sizes: Sequence[int], nbytes: int) -> bytes:
    """What ``torch.save`` pickles for a contiguous CPU tensor, without the unused memo."""
    numel = math.prod(sizes)
    storage = STORAGE_CLASS.get(dtype)
    version, where, count = (
        (b"2", b"torch\n" + storage.encode(), numel)
        if storage
        else (b"3", b"torch.storage\nUntypedStorage", nbytes)
    )
    return b"".join(
        (
            b"\x80\x02ctorch._utils\n_rebuild_tensor_v" + version + b"\n((",
            _pickled_text("storage"),
            b"c" + where + b"\n",
            _pickled_text("0"),
            _pickled_text("cpu"),
            _pickled_int(count),
            b"tQK\x00",
            _pickled_tuple(sizes),
            _pickled_tuple(contiguous_strides(sizes)),
            b"\x89ccollections\nOrderedDict\n)R",
            b"" if storage else b"ctorch\n" + dtype.encode() + b"\n",
            b"tR.",
        )
    )


@dataclass(frozen=True)
class _Record:
    name: bytes
    crc: int
    size: int
    offset: int  # of the local header, in the entry


def _local_header(name: bytes, crc: int, size: int, extra: bytes = b"") -> bytes:
    stated = size
    if size >= MAX32:
        extra = struct.pack("<HHQQ", 1, 16, size, size) + extra
        stated = MAX32
    version = 45 if size >= MAX32 else 20
    return (
        struct.pack(
            "<4sHHHHHIIIHH",
            LOCAL,
            version,
            _UTF8,
            0,
            0,
            0x21,
            crc,
            stated,
            stated,
            len(name),
            len(extra),
        )
        + name
        + extra
    )


def _central_header(record: _Record) -> bytes:
    wide = b""
    size = record.size
    offset = record.offset
    if size >= MAX32:
        wide += struct.pack("<QQ", size, size)
        size = MAX32
    if offset >= MAX32:
        wide += struct.pack("<Q", offset)
        offset = MAX32
    extra = struct.pack("<HH", 1, len(wide)) + wide if wide else b""
    version = 45 if wide else 20
    return (
        struct.pack(
            "<4sHHHHHHIIIHHHHHII",
            CENTRAL,
            version,
            version,
            _UTF8,
            0,
            0,
            0x21,
            record.crc,
            size,
            size,
            len(record.name),
            len(extra),
            0,
            0,
            0,
            0,
            offset,
        )
        + record.name
        + extra
    )


def tensor_header(dtype: str, sizes: Sequence[int], nbytes: int, offset: int) -> bytes:
    """All bytes of an entry before its payload, for an entry that begins `offset` into its file."""
    parts = b""
    for name, data in (
        (b"archive/data.pkl", _tensor_pickle(dtype, sizes, nbytes)),
        (b"archive/byteorder", _BYTEORDER),
    ):
        parts += _local_header(name, zlib.crc32(data), len(data)) + data
    bare = len(parts) + len(_local_header(_PAYLOAD_NAME, 0, nbytes)) + 4  # 4: the padding's header
    padding = -(offset + bare) % ALIGNMENT
    # "FB" is the tag that torch's own alignment padding has.
    extra = struct.pack("<2sH", b"FB", padding) + b"\0" * padding
    return parts + _local_header(_PAYLOAD_NAME, 0, nbytes, extra)


def tensor_trailer(header: bytes, nbytes: int, table: Sequence[int] | None) -> bytes:
    """All bytes of an entry after its payload; `table` is the block table, or None for none."""
    records = []
    position = 0
    while header[position : position + 4] == LOCAL:
        crc, _, size, name_size, extra_size = struct.unpack_from("<IIIHH", header, position + 14)
        body = position + 30 + name_size + extra_size
        name = header[position + 30 : position + 30 + name_size]
        size = nbytes if name == _PAYLOAD_NAME else size
        records.append(_Record(name, crc, size, position))
        if name == _PAYLOAD_NAME:
            break
        position = body + size
    begin = len(header) + nbytes
    out = b""
    small = [(b"archive/version", b"3\n")]
    if table is not None:
        small.insert(0, (_TABLE_NAME, struct.pack(f"<{len(table)}I", *table)))
    for name, data in small:
        record = _Record(name, zlib.crc32(data), len(data), begin + len(out))
        records.append(record)
        out += _local_header(name, record.crc, record.size) + data
    directory = b"".join(map(_central_header, records))
    return out + directory + _zip_end(len(records), len(directory), begin + len(out))


def _zip_end(count: int, size: int, offset: int) -> bytes:
    wide = b""
    if offset >= MAX32:
        wide = struct.pack("<4sQHHIIQQQQ", END64, 44, 45, 45, 0, 0, count, count, size, offset)
        wide += struct.pack("<4sIQI", LOCATOR64, 0, offset + size, 1)
        offset = MAX32
    return wide + struct.pack("<4sHHHHIIH", END, 0, 0, count, count, size, offset, 0)


class Envelopes:
    """Headers and trailers of many small tensors, made once for each dtype and shape.

    Those of one dtype and shape differ in their checksums alone, and in the padding.
    """

    def __init__(self, checksum: Callable[[bytes, int], int] | None) -> None:
        self._checksum = checksum
        self._known: dict[object, tuple[bytes, int, tuple[bytes, ...]]] = {}

    def around(
        self, dtype: str, sizes: Sequence[int], payload: bytes, offset: int
    ) -> tuple[bytes, bytes]:
        """Header and trailer of a payload of one block, as the functions above make them."""
        checksum, nbytes = self._checksum, len(payload)
        key = dtype, sizes, offset % ALIGNMENT
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            found = self._known[key] = self._make(dtype, sizes, nbytes, offset)
        header, crc, (first, middle, last, end) = found
        if checksum is None:
            return header, first
        table = struct.pack("<2I", crc, checksum(payload, 0)) if nbytes else struct.pack("<I", crc)
        zip_crc = struct.pack("<I", zlib.crc32(table))
        return header, b"".join((first, zip_crc, middle, table, last, zip_crc, end))

    def _make(
        self, dtype: str, sizes: Sequence[int], nbytes: int, offset: int
    ) -> tuple[bytes, int, tuple[bytes, ...]]:
        header = tensor_header(dtype, sizes, nbytes, offset)
        if self._checksum is None:
            return header, 0, (tensor_trailer(header, nbytes, None), b"", b"", b"")
        count = table_bytes(nbytes) // 4
        trailer = tensor_trailer(header, nbytes, [0] * count)
        table = 30 + len(_TABLE_NAME)
        again = trailer.index(_TABLE_NAME, table) - 46  # in the directory
        parts = (
            trailer[:14],
            trailer[18:table],
            trailer[table + 4 * count : again + 16],
            trailer[again + 20 :],
        )
        return header, self._checksum(header, 0), parts


def table_bytes(nbytes: int) -> int:
    """Length of the block table of a payload of `nbytes`, in bytes."""
    return 4 * (1 + -(-nbytes // block_size(nbytes)))


def unpack_table(trailer: bytes, nbytes: int) -> tuple[int, ...]:
    """The block table in a trailer whose checksum has been found right."""
    size = table_bytes(nbytes)
    begin = 30 + len(_TABLE_NAME)
    if trailer[30:begin] != _TABLE_NAME or len(trailer) < begin + size:
        raise CorruptCheckpointError("the entry's trailer holds no table of block checksums")
    return struct.unpack_from(f"<{size // 4}I", trailer, begin)
