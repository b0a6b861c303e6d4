"""The index of ``.metadata``: what a rank reads instead of all of it.

A checkpoint of thousands of ranks has a box of each tensor for each of them, of which one rank
wants a few.  So the boxes are written a second time, as columns of integers: hundreds of boxes
together, compressed, in blocks of which a rank decodes those that it asks for.  What a block does
not hold (keys, shapes, dtypes, planner data) is the index's head: the same pickle as the metadata,
without a box, and read by the same code.

The index is the last value in the pickle of ``.metadata``, so that it is committed, copied,
replaced and deleted with it, and found from its end::

    ... block, block, ..., head, footer | SUFFIX | seal

Numbers are little-endian.  A block is zlib's of some tables of int64 numbers, one after the other,
of each its columns.  A table is a tiling (an offset and a size for each dimension of its boxes), of
which tensors of one size that are cut alike have one; or the entries of a key, in the order of its
boxes (file, offset, length, kind, payload, payload's length, CRC; -1: none).  Of a column lie there
the differences (but of the CRCs), their sign in the lowest bit; and of all numbers of a block
first all lowest bytes, then all next ones.  The head is zlib's of the pickle (whose attribute lists
``tilings``, the boxes of each, ``keys``, the tiling of each or -1, and ``blocks``, tables and bytes
of each: tilings first) and, behind it, the names of files, one a line.  The footer has magic, the
lengths of all of the index, of the head, of the head unpacked and of its pickle, and the CRC-32 of
all of that.
"""

from __future__ import annotations

import struct
import sys
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)

from dcp_fsdp_osd.errors import CorruptCheckpointError
from dcp_fsdp_osd.storage.chunks import chunk_table
from dcp_fsdp_osd.storage.dump import SUFFIX, dump_pickle
from dcp_fsdp_osd.storage.memory import DTYPE_NAMES, view_bytes
from dcp_fsdp_osd.storage.places import (
    ATTRIBUTE,
    KIND_TENSOR,
    EntryInfo,
    Places,
)

__all__ = [
    "ENTRY",
    "FOOTER_BYTES",
    "INDEXED",
    "KIND",
    "NONE",
    "Footer",
    "index_of",
    "inflated",
    "numbers_of",
    "pack_index",
    "read_footer",
    "unpack_index",
]

INDEXED = 2000
"""Boxes from which on metadata have an index."""
_ROWS = 512  # that make a block
_MAGIC = b"DCPOSDX1"
_FOOTER = struct.Struct("<8sQQQQI")
FOOTER_BYTES = _FOOTER.size
ENTRY = 7
"""Columns of an entry, the CRC last."""
KIND = 3
"""Which of them is the kind."""
NONE = -1
_POSITIVE = (1 << 63) - 1


# ---- writing ----


def index_of(metadata: Metadata) -> bytes | None:
    """The index of what is about to be written; None where there is little, or what has no place
    in an index: then readers take the metadata whole.
    """
    places = metadata.storage_data
    if not isinstance(places, Places) or len(places) < INDEXED or sys.byteorder != "little":
        return None
    known = places.by_place()
    count = 0
    files = {name: number for number, name in enumerate(places.names())}
    tilings: dict[Any, int] = {}
    cuts: dict[Any, tuple[int, Sequence[torch.Size | None]]] = {}
    tables: list[torch.Tensor] = []
    entries: list[torch.Tensor] = []
    keys: list[int] = []
    bare: dict[str, Any] = {}
    for key, stored in metadata.state_dict_metadata.items():
        tiling, dtype = NONE, ""
        offsets: Sequence[torch.Size | None] = [None]
        bare[key] = stored
        if isinstance(stored, TensorStorageMetadata):
            bare[key] = TensorStorageMetadata(stored.properties, stored.size, [])
            dtype = DTYPE_NAMES.get(stored.properties.dtype, "")
            shared = type(stored.chunks) is list  # of objects that others may have as well
            same = (stored.size, *map(id, stored.chunks if shared else [stored]))
            if same not in cuts:
                chunks = list(stored.chunks)
                begins = [chunk.offsets for chunk in chunks]
                boxes = stored.size, (*begins,), tuple([chunk.sizes for chunk in chunks])
                cuts[same] = tilings.setdefault(boxes, len(tables)), begins
                if cuts[same][0] == len(tables):
                    try:
                        tables.append(_tiling(stored, begins))
                    except ValueError:
                        return None
            tiling, offsets = cuts[same]
        elif not isinstance(stored, BytesStorageMetadata):
            return None
        keys.append(tiling)
        found = [known.get((key, offset)) for offset in offsets]
        numbers = _numbers(found, files, dtype)
        if numbers is None:
            return None
        entries.append(numbers)
        count += len(found)
    if count != len(known):
        return None
    blocks, data = _blocks(tables, entries)
    ours = {k: v for k, v in vars(metadata)[ATTRIBUTE].items() if k != "files"}
    rows = [table.shape[1] for table in tables]
    for name, values in (("tilings", rows), ("keys", keys), ("blocks", blocks)):
        ours[name] = array("q", values).tobytes()
    head = Metadata(bare)
    vars(head).update(
        {**vars(metadata), "state_dict_metadata": bare, "storage_data": {}, ATTRIBUTE: ours}
    )
    return pack_index(head, files, b"".join(data))


def pack_index(head: Metadata, names: Iterable[str], blocks: bytes) -> bytes:
    """The bytes of an index."""
    pickled = dump_pickle(head)
    unpacked = pickled + "\n".join(names).encode("utf-8", "surrogatepass")
    packed = zlib.compress(unpacked)
    body = blocks + packed
    lengths = len(body) + FOOTER_BYTES, len(packed), len(unpacked), len(pickled)
    crc = zlib.crc32(_FOOTER.pack(_MAGIC, *lengths, 0), zlib.crc32(body))
    return body + _FOOTER.pack(_MAGIC, *lengths, crc)


def _tiling(stored: TensorStorageMetadata, begins: Sequence[torch.Size]) -> torch.Tensor:
    """
    Raises:
        ValueError: not every box is told from the others by where it begins, or can be one.
    """
    # A box without elements may begin where another one does: they have one entry.
    if len(set(begins)) != len(begins):
        raise ValueError("boxes that begin at one place")
    return torch.cat(chunk_table(stored).columns)


def _numbers(
    found: Sequence[EntryInfo | None], files: Mapping[str, int], dtype: str
) -> torch.Tensor | None:
    """The entries of a key, of shape (columns, rows); None where they are not one for each box."""
    if not found:
        return torch.empty((ENTRY, 0), dtype=torch.int64)
    if None in found:
        return None
    columns = zip(*cast("Sequence[EntryInfo]", found), strict=True)
    names, offsets, lengths, kinds, crcs, payloads, nbytes, dtypes = columns
    for kind, of in {*zip(kinds, dtypes, strict=True)}:
        if kind is None or (kind == KIND_TENSOR) > (of == dtype):
            return None
    if None in crcs:
        crcs = tuple([NONE if crc is None else crc for crc in crcs])
    numbers = array("q", [files[name] for name in names])
    for column in (offsets, lengths, kinds, payloads, nbytes, crcs):
        numbers.extend(column)
    return torch.frombuffer(numbers, dtype=torch.int64).view(ENTRY, -1)


def _blocks(
    tilings: Sequence[torch.Tensor], entries: Sequence[torch.Tensor]
) -> tuple[list[int], list[bytes]]:
    """Tables and bytes of each block, in turn; and the blocks."""
    about: list[int] = []
    data: list[bytes] = []
    together: list[torch.Tensor] = []
    held = 0
    last = len(tilings) + len(entries)
    for number, table in enumerate((*tilings, *entries), 1):
        found = table.clone()
        lines = len(table) if number <= len(tilings) else ENTRY - 1
        found[:lines, 1:] -= table[:lines, :-1]
        together.append(found.reshape(-1))
        held += table.shape[1]
        if held >= _ROWS or number == last:
            numbers = torch.cat(together)
            numbers = (numbers << 1) ^ (numbers >> 63)
            planes = numbers.view(torch.uint8).reshape(-1, 8).t().contiguous()
            data.append(zlib.compress(view_bytes(planes), 6))
            about += len(together), len(data[-1])
            together, held = [], 0
    return about, data


# ---- reading ----


@dataclass(frozen=True)
class Footer:
    """Attributes:
    start, length: of the index in the file, this included.
    head, unpacked, pickled: bytes of the head, of the head unpacked, and of the pickle in it.
    """

    start: int
    length: int
    head: int
    unpacked: int
    pickled: int


def read_footer(tail: bytes, size: int) -> Footer | None:
    """The footer of the index of a file of `size` bytes, by its last bytes but the seal; None if
    there is no index.

    Raises:
        CorruptCheckpointError: there is something else.
    """
    end = len(tail) - len(SUFFIX)
    if end < FOOTER_BYTES or not tail.endswith(SUFFIX):
        return None
    magic, length, head, unpacked, pickled, _ = _FOOTER.unpack_from(tail, end - FOOTER_BYTES)
    if magic != _MAGIC:
        return None
    start = size - len(SUFFIX) - length
    # The pickle beside it holds all that the head does, uncompressed.
    if not (start > 0 and FOOTER_BYTES + head <= length and pickled <= unpacked <= start):
        raise CorruptCheckpointError("its index does not fit into it; the file was altered")
    return Footer(start, length, head, unpacked, pickled)


def unpack_index(data: bytes, footer: Footer) -> tuple[bytes, list[str], bytes]:
    """The head's pickle, the names of files, and the blocks of an index.

    Raises:
        CorruptCheckpointError: its checksum does not match, or it is not what it says.
    """
    body = memoryview(data)[: footer.length - FOOTER_BYTES]
    *known, crc = _FOOTER.unpack(data[len(body) :])
    if zlib.crc32(_FOOTER.pack(*known, 0), zlib.crc32(body)) != crc:
        raise CorruptCheckpointError(
            "the checksum of its index does not match; the file was altered or cut off"
        )
    head = inflated(body[len(body) - footer.head :], footer.unpacked)
    names = head[footer.pickled :].decode("utf-8", "surrogatepass")
    return head[: footer.pickled], names.split("\n"), bytes(body[: len(body) - footer.head])


def inflated(data: bytes | memoryview, size: int) -> bytes:
    """`data` decompressed to `size` bytes, and to no more.

    Raises:
        CorruptCheckpointError: to others.
    """
    try:
        engine = zlib.decompressobj()
        found = engine.decompress(data, size + 1)
    except zlib.error as error:
        raise CorruptCheckpointError(f"a part of its index is damaged: {error}") from None
    if len(found) != size or not engine.eof:
        raise CorruptCheckpointError("a part of its index has another length than it says")
    return found


def numbers_of(data: bytes) -> torch.Tensor:
    """The int64 numbers of a block."""
    if not data:
        return torch.empty(0, dtype=torch.int64)
    planes = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(8, -1)
    numbers = planes.t().contiguous().view(torch.int64).squeeze(1)
    return ((numbers >> 1) & _POSITIVE) ^ -(numbers & 1)
