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
import io
import pickle
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby, islice, repeat
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
from dcp_fsdp_osd.storage.places import ATTRIBUTE, KIND_TENSOR, Places, Row, storage_info

__all__ = ["INDEX", "SUFFIX", "dump_pickle"]

INDEX = "index"
"""Under which the index lies in the metadata's own attribute."""
SUFFIX = b"uub."
"""What follows the index: the ends of the attribute, of the metadata, and of the pickle."""
_FRAME = 1 << 18
_BATCH = 1000  # values between two MARKs, as pickle writes them
_MOST = 1 << 16  # numbers that are kept
_INT32, _UINT64 = struct.Struct("<i"), struct.Struct("<Q")
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
        self._sizes: dict[torch.Size | None, bytes] = {None: b"N"}
        self._numbers = _Numbers()
        self._chunks: dict[tuple[torch.Size, torch.Size], bytes] = {}
        self._lists: dict[tuple[int, ...] | None, bytes] = {}
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

    def put_all(self, parts: Iterable[bytes]) -> None:
        """:meth:`put` of each."""
        append, framed = self._frame.append, self._framed
        for data in parts:
            append(data)
            framed += len(data)
            if framed > _FRAME:
                self._framed = framed
                self.put(b"")
                append, framed = self._frame.append, 0
        self._framed = framed

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
        # Tensors that are cut alike have the same objects, where our planner has made them.
        same = tuple(map(id, chunks)) if type(chunks) is list else None
        boxes = None if same in self._lists else _boxes_of(chunks)
        if type(value) is not TensorStorageMetadata or (boxes is None and same not in self._lists):
            return self.plain(value)
        texts, sizes = self._texts, self._sizes
        parts = [self.kind(TensorStorageMetadata), b")\x81}("]
        for name, field in vars(value).items():
            parts.append(texts.get(name) or self.text(name))
            if name == "chunks":
                parts.append(self._list(boxes) if boxes is not None else self._lists[same])
                if same is not None and boxes is not None:
                    self._lists[same] = self._list(boxes)  # references, by now
            elif type(field) is TensorProperties:
                known = self._properties.get(tuple(vars(field).values()))
                parts.append(known or self._of_properties(field))
            elif type(field) is torch.Size:
                parts.append(sizes.get(field) or self.size(field))
            else:
                parts.append(self.plain(field))
        parts.append(b"ub")
        return b"".join(parts)

    def _list(self, boxes: Sequence[tuple[torch.Size, torch.Size]]) -> bytes:
        made, known = b"]", self._chunks
        for begin in range(0, len(boxes), _BATCH):
            batch = boxes[begin : begin + _BATCH]
            made += b"(" + b"".join([known.get(box) or self._chunk(*box) for box in batch]) + b"e"
        return made

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
        rows, count = places.rows(), 0
        for fqn, offset, hint, entry in islice(rows, 1):  # writes out what all others refer to
            self.put(b"(")
            index = MetadataIndex(fqn, offset, hint)
            self.put(self._fields(index) + self._fields(storage_info(entry)))
            count = 1
        while batch := list(islice(rows, _BATCH - count % _BATCH)):
            if count % _BATCH == 0:
                self.put(b"u(")
            count += len(batch)
            for kind, some in groupby(batch, key=lambda row: row[3].kind):
                self._put_rows(list(some), kind)
        if count:
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

    def _put_rows(self, rows: Sequence[Row], kind: int | None) -> None:
        """Puts entries of one kind as :meth:`_fields` does, once that has written another: column
        by column, as a call for each value takes longer than all else.
        """
        texts, text, size, numbers = self._texts, self.text, self.size, self._numbers
        fqns, offsets, hints, infos = zip(*rows, strict=True)
        names, starts, lengths, _, crcs, payloads, nbytes, dtypes = zip(*infos, strict=True)
        columns: list[tuple[dict[Any, bytes], Callable[[Any], bytes], Sequence[Any]]]
        columns = [(texts, text, fqns), (self._sizes, size, offsets), (texts, text, names)]
        if kind is not None:  # its name: the first entry may have been without
            columns.append((texts, text, [ATTRIBUTE] * len(rows)))
        if kind == KIND_TENSOR:
            columns.append((texts, text, dtypes))
        found = [list(map(known.get, values)) for known, _, values in columns]
        news = [number for number, each in enumerate(found) if None in each]
        if len(news) > 1 < len(rows):
            for row in rows:  # what is new has to be written in the order of the memo
                self._put_rows((row,), kind)
            return
        for number in news:
            _, make, values = columns[number]
            found[number] = [
                ref or make(each) for ref, each in zip(found[number], values, strict=True)
            ]
        parts: list[Iterable[bytes | None]] = [
            repeat(self.kind(MetadataIndex) + b")\x81}(" + text("fqn")), found[0],
            repeat(text("offset")), found[1],
            repeat(text("index")), map(numbers.__getitem__, hints),
            repeat(b"ub" + self.kind(_StorageInfo) + b")\x81}(" + text("relative_path")), found[2],
            repeat(text("offset")), _numbers(starts),
            repeat(text("length")), map(numbers.__getitem__, lengths),
        ]  # fmt: skip
        if kind is not None:
            parts += found[3], repeat((b"(" if kind == KIND_TENSOR else b"") + _number(kind))
            parts += (_numbers(crcs),)
        if kind == KIND_TENSOR:
            parts += map(numbers.__getitem__, payloads), map(numbers.__getitem__, nbytes), found[4]
        parts += (repeat({None: b"ub", KIND_TENSOR: b"tub"}.get(kind, b"\x86ub")),)
        self.put_all(map(b"".join, zip(*parts)))  # noqa: B905 - repeat() has no end


class _Numbers(dict[int | None, bytes]):
    """Numbers that have been written before, as lengths and the like repeat."""

    def __missing__(self, value: int | None) -> bytes:
        made = b"N" if value is None else _number(value)
        if len(self) < _MOST:
            self[value] = made
        return made


def _numbers(values: Sequence[int | None]) -> list[bytes]:
    """Of those that hardly repeat."""
    int32, uint64 = _INT32.pack, _UINT64.pack
    return [
        b"N" if value is None
        else b"J" + int32(value) if 0xFFFF < value < 1 << 31
        else b"\x8a\x05" + uint64(value)[:5] if 1 << 31 <= value < 1 << 39  # a CRC, an offset
        else _number(value)
        for value in values
    ]  # fmt: skip


def _boxes_of(chunks: Any) -> list[tuple[torch.Size, torch.Size]] | None:
    """Offsets and sizes of chunks; None where they cannot be written by these alone."""
    if not isinstance(chunks, Iterable):
        return None
    objects = list(chunks)
    if not {ChunkStorageMetadata}.issuperset(map(type, objects)):
        return None
    fields = [vars(chunk) for chunk in objects]
    offsets, sizes = ([each.get(name) for each in fields] for name in ("offsets", "sizes"))
    if not {torch.Size}.issuperset(map(type, (*offsets, *sizes))) or {*map(len, fields)} - {2}:
        return None
    return list(zip(offsets, sizes, strict=True))


def _number(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K%c" % value
    if 0 <= value < 1 << 16:
        return b"M" + struct.pack("<H", value)
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + _INT32.pack(value)
    if 0 < value < 1 << 39:
        return b"\x8a\x05" + _UINT64.pack(value)[:5]
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
