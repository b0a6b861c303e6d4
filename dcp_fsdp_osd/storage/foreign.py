"""Entries that ``torch.save`` wrote: where their payload lies, found without loading them.

Pure.  No byte of an entry is trusted, and its pickle is read by ``pickles.py``, where all globals
stand for descriptions.
"""

from __future__ import annotations

import math
import struct
import sys
from dataclasses import dataclass
from typing import Any

from dcp_fsdp_osd.storage.entry import (
    CENTRAL,
    END,
    END64,
    LOCAL,
    LOCATOR64,
    MAX32,
    STORAGE_CLASS,
    contiguous_strides,
)
from dcp_fsdp_osd.storage.pickles import Maker, load_pickle

__all__ = [
    "HEAD_BYTES",
    "TAIL_BYTES",
    "ForeignTensor",
    "directory",
    "parse_foreign",
    "record",
]

_BYTEORDER = sys.byteorder.encode()
_CLASS_DTYPE = {value: key for key, value in STORAGE_CLASS.items()}

HEAD_BYTES = 1 << 11
"""How much of the beginning of a foreign entry is read to parse it."""
TAIL_BYTES = 1 << 12
"""How much of the end of a foreign entry is read to parse it."""


@dataclass(frozen=True)
class ForeignTensor:
    """Where the payload of an entry that ``torch.save`` wrote lies; a contiguous plain tensor.

    `payload` is the offset in the entry of the tensor's first element, `nbytes` its length.
    """

    dtype: str
    sizes: tuple[int, ...]
    payload: int
    nbytes: int


class _NotPlain(Exception):
    """Anything that is not one contiguous strided tensor; torch.load must do."""


@dataclass(frozen=True)
class _Storage:
    dtype: str | None
    key: str
    count: int


@dataclass(frozen=True)
class _Tensor:
    args: tuple[Any, ...]  # of the function that torch makes it with


def _tensor(*args: Any) -> _Tensor:
    return _Tensor(args)


def _no_hooks() -> dict[Any, Any]:
    return {}


def _find(module: str, name: str) -> Any:
    """What stands for the globals of a tensor's pickle: descriptions, and nothing of torch's."""
    if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"):
        return Maker(name, call=_tensor)
    if (module, name) == ("collections", "OrderedDict"):
        return Maker(name, call=_no_hooks)
    if module == "torch" and name in _CLASS_DTYPE:
        return _CLASS_DTYPE[name]
    if module == "torch.storage" and name == "UntypedStorage":
        return None
    if module == "torch" and name.replace("_", "").isalnum() and name.islower():
        return name  # a dtype; the caller checks that it is one
    raise _NotPlain


def _storage(pid: Any) -> _Storage:
    kind, dtype, key, _, count = pid
    if kind != "storage":
        raise _NotPlain
    return _Storage(dtype, key, count)


def parse_foreign(
    head: bytes, tail: bytes, length: int, itemsizes: dict[str, int]
) -> ForeignTensor | None:
    """Find the payload in an entry of ``torch.save``.

    `head` and `tail` are the first and last bytes of an entry of `length` bytes (overlapping, or
    all of it, where it is short).  None means that the entry has to go through ``torch.load``: a
    legacy file, a subclass, a strided tensor, other byte order, or a directory that is not in the
    tail.  No byte of the entry is trusted: what is returned lies inside of it.
    """
    try:
        records = directory(tail, length)
        prefix = next(n for n in records if n.endswith(b"/data.pkl")).removesuffix(b"data.pkl")
        order = records.get(prefix + b"byteorder")
        if order is not None and record(head, *order) != _BYTEORDER:
            raise _NotPlain
        pickled = record(head, *records[prefix + b"data.pkl"])
        made, _ = load_pickle(pickled, _find, persistent=_storage)
        # v2 and v3 take more arguments for conjugate and negative views: not plain.
        storage, start, sizes, strides, _, hooks, *named = made.args
        if hooks or len(named) != (storage.dtype is None):
            raise _NotPlain
        dtype = storage.dtype or named[0]
        itemsize = itemsizes[dtype]
        if tuple(strides) != contiguous_strides(sizes) and math.prod(sizes) > 1:
            raise _NotPlain
        offset, size = records[prefix + b"data/" + storage.key.encode()]
        name_size, extra_size = struct.unpack_from("<HH", head, offset + 26)
        nbytes = math.prod(sizes) * itemsize
        begin = offset + 30 + name_size + extra_size + start * itemsize
        if start < 0 or min(sizes, default=0) < 0 or (start * itemsize + nbytes) > size:
            raise _NotPlain
        if head[offset : offset + 4] != LOCAL or begin + nbytes > length:
            raise _NotPlain
        return ForeignTensor(dtype, tuple(sizes), begin, nbytes)
    except (
        _NotPlain, AttributeError, IndexError, KeyError, StopIteration, TypeError, ValueError,
        struct.error,
    ):  # fmt: skip
        return None


def record(head: bytes, offset: int, size: int) -> bytes:
    """The bytes of a record whose local header is at `offset`; ValueError if there is none."""
    if head[offset : offset + 4] != LOCAL:
        raise ValueError
    name_size, extra_size = struct.unpack_from("<HH", head, offset + 26)
    begin = offset + 30 + name_size + extra_size
    if begin + size > len(head):
        raise ValueError
    return head[begin : begin + size]


def directory(tail: bytes, length: int) -> dict[bytes, tuple[int, int]]:
    """Record name -> (offset of its local header, size), from the zip's directory.

    Those that are not compressed; ValueError or ``struct.error`` if `tail` has no directory.
    """
    end = tail.rfind(END)
    if end < 0:
        raise ValueError
    count, size, offset = struct.unpack_from("<HII", tail, end + 10)
    locator = end - 20
    if locator >= 0 and tail[locator : locator + 4] == LOCATOR64:
        (where,) = struct.unpack_from("<Q", tail, locator + 8)
        wide = where - (length - len(tail))
        if wide < 0 or tail[wide : wide + 4] != END64:
            raise ValueError
        count, size, offset = struct.unpack_from("<QQQ", tail, wide + 32)
    position = offset - (length - len(tail))
    if position < 0 or position + size > len(tail):
        raise ValueError
    records = {}
    for _ in range(count):
        if tail[position : position + 4] != CENTRAL:
            raise ValueError
        method, usize, name_size, extra_size, comment = (
            struct.unpack_from("<H", tail, position + 10)[0],
            struct.unpack_from("<I", tail, position + 24)[0],
            *struct.unpack_from("<HHH", tail, position + 28),
        )
        (offset,) = struct.unpack_from("<I", tail, position + 42)
        name = tail[position + 46 : position + 46 + name_size]
        extra = tail[position + 46 + name_size : position + 46 + name_size + extra_size]
        usize, offset = _widen(extra, usize, offset)
        if method == 0:
            records[name] = (offset, usize)
        position += 46 + name_size + extra_size + comment
    return records


def _widen(extra: bytes, usize: int, offset: int) -> tuple[int, int]:
    position = 0
    while position + 4 <= len(extra):
        tag, size = struct.unpack_from("<HH", extra, position)
        if tag == 1:
            values = list(struct.unpack_from(f"<{size // 8}Q", extra, position + 4))
            if usize == MAX32 and values:
                usize = values.pop(0)
                if values and len(values) > (offset == MAX32):
                    values.pop(0)  # the compressed size
            if offset == MAX32 and values:
                offset = values.pop(0)
        position += 4 + size
    return usize, offset
