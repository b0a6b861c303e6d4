"""What a pickle of DCP's metadata may hold, as makers for ``pickles.py``.

Instances are those of torch's own classes, made and filled here; their fields are checked as far
as all later code relies on: names are strings, offsets and sizes are ``torch.Size``, and what is
hashed cannot nest.
"""

from __future__ import annotations

import pathlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import metadata as sharded
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from dcp_fsdp_osd import compat
from dcp_fsdp_osd.errors import UnsafeCheckpointError
from dcp_fsdp_osd.storage.pickles import (
    MAX_FLAT,
    MAX_MARKS,
    SCALARS,
    Maker,
    PickleError,
    is_flat,
    load_pickle,
)

__all__ = ["check_nesting", "load_dcp_pickle"]

_METADATA = "torch.distributed.checkpoint.metadata"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"  # of the properties before torch 2.4
_LIMIT = 1 << 62  # of offsets and sizes
_COUNT = frozenset({int})
_SIZE_OR_NONE = frozenset({torch.Size, type(None)})
_INT_OR_NONE = frozenset({int, type(None)})
_ENCODINGS = tuple(
    getattr(module, name)
    for module, name in ((dcp, "_MEM_FORMAT_ENCODING"), (sharded, "MEM_FORMAT_ENCODING"))
    if hasattr(module, name)
)
_PROPERTIES = tuple(
    module.TensorProperties for module in (dcp, sharded) if hasattr(module, "TensorProperties")
)
_PLAIN = (torch.dtype, torch.layout, *_ENCODINGS, bool, type(None))
_PATHS = (pathlib.PurePosixPath, pathlib.PureWindowsPath)
_HASHABLE = frozenset({*SCALARS, dcp.MetadataIndex, torch.dtype, *_PATHS, *_ENCODINGS})


def load_dcp_pickle(data: bytes) -> tuple[Any, int]:
    """What ``pickle.load`` gives, where it is made of what DCP's metadata are, and its end.

    Raises:
        PickleError: it is broken, or made of anything else.
        UnsafeCheckpointError: it names a class or function that is no part of DCP's metadata.
    """
    sizes: dict[Any, torch.Size] = {}
    makers = {**_makers(), ("torch", "Size"): Maker("torch.Size", call=partial(_size, sizes))}

    def find(module: str, name: str) -> Any:
        found: Any = makers.get((module, name))
        if found is None and module == "torch" and name.isidentifier():
            value = getattr(torch, name, None)
            found = value if isinstance(value, torch.dtype) else None
        if found is None:
            raise UnsafeCheckpointError(
                f"the pickle wants {module}.{name}, which is no part of DCP metadata. Loading it "
                "could run code: pass allow_pickle=True only if you trust where it comes from."
            )
        return found

    return load_pickle(data, find, hashable=_HASHABLE, builders=_BUILDERS)


# ---- the values ----


def _size(known: dict[Any, torch.Size], values: Any) -> torch.Size:
    """Offsets and sizes repeat: one of each is enough."""
    if type(values) is tuple and len(values) <= MAX_FLAT and _COUNT.issuperset(map(type, values)):
        found = known.get(values)
        if found is None and min(values, default=0) >= 0 and max(values, default=0) < _LIMIT:
            found = known[values] = torch.Size(values)
        if found is not None:
            return found
    raise ValueError("torch.Size takes a tuple of counts")


def _layout(name: Any) -> torch.layout:
    found = getattr(torch, name.removeprefix("torch."), None) if type(name) is str else None
    if not isinstance(found, torch.layout):
        raise ValueError("no torch.layout")
    return found


def _encoding(kind: Any, value: Any) -> Any:
    if type(value) is not int:
        raise ValueError(f"no {kind.__name__}")
    return kind(value)


def _path(kind: type, *parts: Any) -> Any:
    if not all(type(part) is str for part in parts):
        raise ValueError("a path of other things than texts")
    return kind(*parts)


def _flat(kind: Any, *values: Any) -> Any:
    """For slices, ranges and complex numbers."""
    if not all(type(value) in (int, float, type(None)) for value in values):
        raise ValueError(f"a {kind.__name__} of other things than numbers")
    return kind(*values)


def _collection(kind: Any, values: Any = ()) -> Any:
    if type(values) is not list or not all(is_flat(value, _HASHABLE) for value in values):
        raise ValueError(f"a {kind.__name__} of what cannot be hashed")
    return kind(values)


def _bytes(values: Any = b"") -> bytearray:
    if type(values) is not bytes:
        raise ValueError("a bytearray of other things than bytes")
    return bytearray(values)


def _ordered() -> OrderedDict[Any, Any]:
    return OrderedDict()


# ---- the classes ----


def _fill(instance: Any, state: Any) -> None:
    """Fields from a dict of them.  The dict is emptied: a pickle's memo would keep it."""
    if type(state) is not dict or not (
        _FIELDS.issuperset(state) or all(type(k) is str and k[:2] != "__" for k in state)
    ):
        raise ValueError(f"no fields of a {type(instance).__name__}")
    instance.__dict__.update(state)
    state.clear()


def _fill_index(instance: Any, state: Any) -> None:
    fields = instance.__dict__
    if (
        type(state) is not dict
        or not _INDEX.issuperset(state)
        or type(state.get("fqn")) is not str
        or type(state.get("offset")) not in _SIZE_OR_NONE
        or type(state.get("index")) not in _INT_OR_NONE
        or fields  # it may be a key by now
    ):
        raise ValueError("no fields of a MetadataIndex")
    fields.update(state)
    state.clear()


def _fill_chunk(instance: Any, state: Any) -> None:
    if (
        type(state) is not dict
        or len(state) != 2
        or type(state["offsets"]) is not torch.Size
        or type(state["sizes"]) is not torch.Size
    ):
        raise ValueError("no fields of a ChunkStorageMetadata")
    instance.__dict__.update(state)
    state.clear()


def _fill_info(instance: Any, state: Any) -> None:
    if type(state) is dict:
        for value in state.values():
            if type(value) not in SCALARS and not is_flat(value):
                raise ValueError("no fields of a _StorageInfo")
    _fill(instance, state)


def _fill_properties(instance: Any, state: Any) -> None:
    count = compat.PROPERTIES
    if (
        type(state) is not tuple
        or len(state) < count
        or not all(isinstance(value, _PLAIN) for value in state[:count])
        or not all(is_flat(value) for value in state[count:])
    ):
        raise ValueError("no fields of a TensorProperties")
    instance.__setstate__(compat.properties_state(type(instance), state))


def _fill_storage_meta(instance: Any, state: Any) -> None:
    _fill(instance, state)
    if not all(isinstance(value, _PATHS) or is_flat(value) for value in vars(instance).values()):
        raise ValueError("no fields of a StorageMeta")


_INDEX = frozenset({"fqn", "offset", "index"})
_FIELDS = frozenset({
    "relative_path", "offset", "length", "transform_descriptors", "dcp_fsdp_osd",
    "properties", "size", "chunks",
})  # fmt: skip
_FILL: Mapping[str, Callable[[Any, Any], None]] = {
    "BytesStorageMetadata": _fill,
    "ChunkStorageMetadata": _fill_chunk,
    "Metadata": _fill,
    "MetadataIndex": _fill_index,
    "StorageMeta": _fill_storage_meta,
    "TensorStorageMetadata": _fill,
}
_BUILDERS: Mapping[type, Callable[[Any, Any], None]] = {
    **{getattr(dcp, name): fill for name, fill in _FILL.items()},
    **dict.fromkeys(_PROPERTIES, _fill_properties),
    _StorageInfo: _fill_info,
}


def _makers() -> dict[tuple[str, str], Maker]:
    def instances(kind: type) -> Maker:
        return Maker(kind.__name__, new=partial(kind.__new__, kind))

    found = {(_METADATA, name): instances(getattr(dcp, name)) for name in _FILL}
    found["torch.distributed.checkpoint.filesystem", "_StorageInfo"] = instances(_StorageInfo)
    for kind in _PROPERTIES:
        found[kind.__module__, "TensorProperties"] = instances(kind)
    for kind in _ENCODINGS:
        found[kind.__module__, kind.__name__] = Maker(kind.__name__, partial(_encoding, kind))
    found["torch.serialization", "_get_layout"] = Maker("_get_layout", _layout)
    found["collections", "OrderedDict"] = Maker("OrderedDict", _ordered)
    for module in ("builtins", "__builtin__"):  # the latter in protocol 2
        for kind in (set, frozenset):
            found[module, kind.__name__] = Maker(kind.__name__, partial(_collection, kind))
        for kind in (complex, slice, range):
            found[module, kind.__name__] = Maker(kind.__name__, partial(_flat, kind))
        found[module, "bytearray"] = Maker("bytearray", _bytes)
    # A checkpoint_id that was a Path; a pure path of the kind touches no file system.
    for module in ("pathlib", "pathlib._local"):
        for posix in ("PosixPath", "PurePosixPath"):
            found[module, posix] = Maker(posix, partial(_path, pathlib.PurePosixPath))
        for windows in ("WindowsPath", "PureWindowsPath"):
            found[module, windows] = Maker(windows, partial(_path, pathlib.PureWindowsPath))
    return found


def check_nesting(value: object, most: int) -> None:
    """Refuse what would not end when it is walked, hashed, compared or shown.

    That is what holds itself, is deeper than 100 containers, or has more than `most` values counted
    as often as they are reached: a few shared tuples reach any number.

    Raises:
        PickleError: it does.
    """
    known: dict[int, tuple[int, int]] = {}  # id -> values below it, depth
    begun: set[int] = set()
    stack = [value]
    while stack:
        each = stack[-1]
        inside = [child for child in _inside(each) if type(child) not in SCALARS]
        todo = [child for child in inside if id(child) not in known and _inside(child)]
        if not todo:
            below = [known.get(id(child), (1, 0)) for child in inside]
            count = 1 + len(_inside(each)) - len(inside) + sum([number for number, _ in below])
            depth = 1 + max([levels for _, levels in below], default=0)
            if count > most or depth > MAX_MARKS:
                raise PickleError(f"values nest {depth} deep, and are {count}")
            known[id(each)] = count, depth
            stack.pop()
        elif id(each) in begun:
            raise PickleError(f"a {type(each).__name__} that holds itself")
        else:
            begun.add(id(each))
            stack += todo


def _inside(value: object) -> list[Any]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, list | tuple | set | frozenset) and not isinstance(value, torch.Size):
        return list(value)
    if isinstance(value, Maker | dcp.Metadata | dcp.TensorStorageMetadata):
        raise PickleError(f"a {type(value).__name__} where plain values belong")
    return []
