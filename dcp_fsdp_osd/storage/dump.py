"""The pickle of DCP's metadata, written opcode by opcode.

``pickle.dump`` of a large checkpoint's metadata writes each box twice, as an object with names for
its fields and a place in the memo.  Here what is equal is written once and referred to: boxes (that
of a tensor and of its two moments, in every block of a model), offsets, names of files and of keys,
and properties.  What nothing refers to takes no place in the memo.  That is smaller, and
``pickle.load`` makes fewer objects of it.

The stream is of protocol 4, in frames, as ``pickle.load`` of any version and file takes it.
"""

from __future__ import annotations

import copyreg
import functools
import io
import pickle
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_fsdp_osd.compat import reduce_properties
from dcp_fsdp_osd.storage.places import ATTRIBUTE, KIND_TENSOR, EntryInfo, Places, storage_info

__all__ = ["INDEX", "SUFFIX", "dump_pickle"]

INDEX = "index"
"""Under which the index lies in the metadata's own attribute."""
SUFFIX = b"uub."
"""What follows the index: the ends of the attribute, of the metadata, and of the pickle."""
_FRAME = 1 << 18
_BATCH = 1000  # values between two MARKs, as pickle writes them
_BY_FIELDS = (
    MetadataIndex,
    BytesStorageMetadata,
    StorageMeta,
    _StorageInfo,
)  # by their fields alone


def dump_pickle(metadata: Metadata, index: bytes | None = None) -> bytes:
    """`metadata` as a pickle that stock reads; with `index` as the last value of its attribute,
    which is then followed by :data:`SUFFIX` alone.
    """
    stream = _Stream()
    fields = dict(vars(metadata))
    ours = fields.pop(ATTRIBUTE, None)
    stream.put(b"\x80\x04", framed=False)
    stream.put(stream.kind(Metadata) + b")\x81}(")
    for name, value in fields.items():
        stream.put(stream.text(name))
        if name == "state_dict_metadata" and isinstance(value, dict):
            stream.items(value.items(), stream.stored)
        elif name == "storage_data" and isinstance(value, Mapping):
            stream.entries(value)
        else:
            stream.put(stream.plain(value))
    if ours is not None:
        stream.put(stream.text(ATTRIBUTE))
        if isinstance(ours, dict):
            given = {key: value for key, value in ours.items() if key != INDEX}
            stream.put(b"}(" + b"".join(map(stream.plain, _flat(given))))
            if index is not None:
                stream.put(stream.text(INDEX))
                stream.put(b"\x8e" + struct.pack("<Q", len(index)), framed=False)
                stream.put(index, framed=False)
            stream.put(SUFFIX, framed=False)
            return stream.end()
        stream.put(stream.plain(ours))
    stream.put(b"ub.")
    return stream.end()


def _flat(items: Mapping[Any, Any]) -> Iterable[Any]:
    for key, value in items.items():
        yield key
        yield value


class _Stream:
    """Opcodes in the order in which they are made: what makes one has to :meth:`put` it, and in
    between nothing else, because the memo counts.
    """

    def __init__(self) -> None:
        self._whole: list[bytes] = []
        self._frame: list[bytes] = []
        self._framed = 0
        self._memo = 0
        self._texts: dict[str, bytes] = {}
        self._kinds: dict[type, bytes] = {}
        self._sizes: dict[torch.Size, bytes] = {}
        self._chunks: dict[tuple[torch.Size, torch.Size], bytes] = {}
        self._objects: dict[int, bytes] = {}
        self._properties: dict[tuple[Any, ...], bytes] = {}

    # ---- frames ----

    def put(self, data: bytes, *, framed: bool = True) -> None:
        if framed:
            self._frame.append(data)
            self._framed += len(data)
        if self._framed > _FRAME or (self._framed and not framed):
            self._whole += [b"\x95", struct.pack("<Q", self._framed), *self._frame]
            self._frame, self._framed = [], 0
        if not framed:
            self._whole.append(data)

    def end(self) -> bytes:
        self.put(b"", framed=False)
        return b"".join(self._whole)

    # ---- values; each is to be put before the next is made ----

    def _memoized(self, known: dict[Any, bytes], key: Any) -> bytes:
        """Remember what was just made."""
        number = self._memo
        self._memo += 1
        known[key] = b"h%c" % number if number < 256 else b"j" + struct.pack("<I", number)
        return b"\x94"

    def text(self, value: str) -> bytes:
        found = self._texts.get(value)
        if found is not None:
            return found
        data = value.encode("utf-8", "surrogatepass")
        head = b"\x8c%c" % len(data) if len(data) < 256 else b"X" + struct.pack("<I", len(data))
        return head + data + self._memoized(self._texts, value)

    def kind(self, cls: Any) -> bytes:
        """A class of torch's."""
        found = self._kinds.get(cls)
        if found is not None:
            return found
        both = self.text(cls.__module__) + self.text(cls.__qualname__)
        return both + b"\x93" + self._memoized(self._kinds, cls)

    def size(self, value: torch.Size) -> bytes:
        found = self._sizes.get(value)
        if found is not None:
            return found
        made = self.kind(torch.Size) + self._tuple(list(map(_number, value))) + b"\x85R"
        return made + self._memoized(self._sizes, value)

    @staticmethod
    def _tuple(parts: list[bytes]) -> bytes:
        if len(parts) <= 3:
            return b"".join(parts) + (b")", b"\x85", b"\x86", b"\x87")[len(parts)]
        return b"(" + b"".join(parts) + b"t"

    def plain(self, value: Any) -> bytes:  # noqa: PLR0911
        """Any value; containers and objects once, however often they are reached."""
        kind = type(value)
        if kind is str:
            return self.text(value)
        simple = _SIMPLE.get(kind)
        if simple is not None:
            return simple(value)
        if kind is torch.Size:
            return self.size(value)
        if kind not in _CONTAINERS and kind not in _BY_FIELDS:
            return self._foreign(value)
        found = self._objects.get(id(value))
        if found is not None:
            return found
        if kind is tuple:
            made = self._tuple([self.plain(each) for each in value])
            return made + self._memoized(self._objects, id(value))
        if kind in _BY_FIELDS:
            return self._instance(value)
        open_, close = (b"]", b"e") if kind is list else (b"}", b"u")
        made = open_ + self._memoized(self._objects, id(value))
        flat = value if kind is list else list(_flat(value))
        for begin in range(0, len(flat), _BATCH):
            batch = [self.plain(each) for each in flat[begin : begin + _BATCH]]
            made += b"(" + b"".join(batch) + close
        return made

    def _instance(self, value: Any) -> bytes:
        made = self.kind(type(value)) + b")\x81" + self._memoized(self._objects, id(value))
        fields = {k: v for k, v in vars(value).items() if k != "transform_descriptors" or v}
        if not fields:
            return made
        return made + b"}(" + b"".join(map(self.plain, _flat(fields))) + b"ub"

    def _foreign(self, value: Any) -> bytes:
        """Of another class, as pickle does it, without a memo."""
        data = b""
        for protocol in (4, 3):  # the latter has no frames, of which large values have several
            buffer = io.BytesIO()
            pickler = pickle.Pickler(buffer, protocol)
            pickler.fast = True
            pickler.dispatch_table = {**copyreg.dispatch_table, TensorProperties: reduce_properties}
            pickler.dump(value)
            data = buffer.getvalue()[2:]
            if data[:1] != b"\x95":
                break
            if struct.unpack_from("<Q", data, 1)[0] == len(data) - 9:
                data = data[9:]
                break
        return data[:-1]

    # ---- what there is much of ----

    # What has been written before is looked up here, without a call for each field.

    def items(self, values: Iterable[tuple[Any, Any]], make: Callable[[Any], bytes]) -> None:
        """A dict; `make` makes a value."""
        self.put(b"}")
        count = -1
        for count, (key, value) in enumerate(values):
            made = (b"u(" if count else b"(") if count % _BATCH == 0 else b""
            made += self.text(key) if type(key) is str else self.plain(key)
            self.put(made + make(value))
        if count >= 0:
            self.put(b"u")

    def stored(self, value: Any) -> bytes:
        """A value of ``state_dict_metadata``."""
        chunks = getattr(value, "chunks", None)
        if type(value) is not TensorStorageMetadata or not _only_chunks(chunks):
            return self.plain(value)
        texts, sizes, boxes = self._texts, self._sizes, self._chunks
        parts = [self.kind(TensorStorageMetadata), b")\x81}("]
        for name, field in vars(value).items():
            parts.append(texts.get(name) or self.text(name))
            if name == "chunks":
                parts.append(b"]")
                for begin in range(0, len(field), _BATCH):
                    parts.append(b"(")
                    for chunk in field[begin : begin + _BATCH]:
                        offsets, shape = chunk.offsets, chunk.sizes
                        parts.append(boxes.get((offsets, shape)) or self._chunk(offsets, shape))
                    parts.append(b"e")
            elif type(field) is TensorProperties:
                known = self._properties.get(tuple(vars(field).values()))
                parts.append(known or self._of_properties(field))
            elif type(field) is torch.Size:
                parts.append(sizes.get(field) or self.size(field))
            else:
                parts.append(self.plain(field))
        parts.append(b"ub")
        return b"".join(parts)

    def _of_properties(self, properties: TensorProperties) -> bytes:
        made = self._foreign(properties)
        return made + self._memoized(self._properties, tuple(vars(properties).values()))

    def _chunk(self, offsets: torch.Size, sizes: torch.Size) -> bytes:
        found = self._chunks.get((offsets, sizes))
        if found is not None:
            return found
        made = self.kind(ChunkStorageMetadata) + b")\x81}("
        made += self.text("offsets") + self.size(offsets) + self.text("sizes") + self.size(sizes)
        return made + b"ub" + self._memoized(self._chunks, (offsets, sizes))

    def entries(self, places: Mapping[Any, Any]) -> None:
        """``storage_data``."""
        if not isinstance(places, Places):
            self.items(places.items(), self.plain)
            return
        self.put(b"}")
        count = -1
        for count, (index, entry) in enumerate(places.pairs()):
            if count % _BATCH == 0:
                self.put(b"u(" if count else b"(")
            if count == 0:  # writes out what all others refer to
                self.put(self._fields(index) + self._fields(storage_info(entry)))
                put = self._put_entry()
            else:
                put(index, entry)
        if count >= 0:
            self.put(b"u")

    def _fields(self, value: Any) -> bytes:
        """An object that nothing else refers to, of values that are no objects."""
        made = self.kind(type(value)) + b")\x81}("
        for name, field in vars(value).items():
            if field is not None or name != "transform_descriptors":
                made += self.text(name)
                flat = type(field) is tuple
                made += self._tuple(list(map(self.plain, field))) if flat else self.plain(field)
        return made + b"ub"

    def _put_entry(self) -> Callable[[MetadataIndex, EntryInfo], None]:
        """Puts an entry as :meth:`_fields` does, once that has written another."""
        text, size, put = self.text, self.size, self.put
        texts, sizes = self._texts, self._sizes
        number = functools.lru_cache(1024)(_number)  # lengths repeat
        fqn = self.kind(MetadataIndex) + b")\x81}(" + text("fqn")
        offset, hint = text("offset"), text("index")
        name = b"ub" + self.kind(_StorageInfo) + b")\x81}(" + text("relative_path")
        length = text("length")

        last, known = "", b""  # entries of one file follow one another

        def put_entry(index: MetadataIndex, entry: EntryInfo) -> None:
            nonlocal last, known
            place, in_file, kind, crc = index.offset, entry.name, entry.kind, entry.crc
            made = fqn + (texts.get(index.fqn) or text(index.fqn)) + offset
            made += b"N" if place is None else sizes.get(place) or size(place)
            made += hint + (b"N" if index.index is None else number(index.index)) + name
            if in_file is last:
                made += known
            else:
                made += texts.get(in_file) or text(in_file)
                last, known = in_file, texts[in_file]
            made += offset + _number(entry.offset) + length + number(entry.length)
            if kind is not None:
                # Not among those above: the first entry may have been without.
                made += text(ATTRIBUTE) + (b"(" if kind == KIND_TENSOR else b"")
                made += number(kind) + (b"N" if crc is None else _number(crc))
                if kind == KIND_TENSOR:
                    made += number(entry.payload) + number(entry.nbytes)
                    made += (texts.get(entry.dtype) or text(entry.dtype)) + b"t"
                else:
                    made += b"\x86"
            put(made + b"ub")

        return put_entry


def _only_chunks(chunks: Any) -> bool:
    """Whether they can be written by their offsets and sizes alone."""
    if not isinstance(chunks, Iterable):
        return False
    for chunk in chunks:
        fields = vars(chunk) if type(chunk) is ChunkStorageMetadata else {}
        offsets, sizes = fields.get("offsets"), fields.get("sizes")
        if not (len(fields) == 2 and type(offsets) is type(sizes) is torch.Size):
            return False
    return True


def _number(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K%c" % value
    if 0 <= value < 1 << 16:
        return b"M" + struct.pack("<H", value)
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    if 0 < value < 1 << 39:  # a CRC, an offset
        return b"\x8a\x05" + struct.pack("<Q", value)[:5]
    data = pickle.encode_long(value)
    if len(data) > 255:
        raise ValueError(f"expected numbers of less than 256 bytes, found one of {len(data)}")
    return b"\x8a%c" % len(data) + data


def _bytes(value: bytes) -> bytes:
    return (
        b"C%c" % len(value) if len(value) < 256 else b"B" + struct.pack("<I", len(value))
    ) + value


_CONTAINERS = frozenset({tuple, list, dict})
_SIMPLE: Mapping[type, Callable[[Any], bytes]] = {
    int: _number,
    bool: lambda value: b"\x88" if value else b"\x89",
    type(None): lambda _: b"N",
    float: lambda value: b"G" + struct.pack(">d", value),
    bytes: _bytes,
}
