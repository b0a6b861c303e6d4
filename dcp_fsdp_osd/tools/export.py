"""A checkpoint as one file, ``torch.save``'s or safetensors', written as it is read.

The file has a temporary name until all of it is written.  No more than a window of elements is held
at a time, whatever the sizes of tensors and file.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import uuid
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from dcp_fsdp_osd.errors import FlatOptimError, StorageError, UnsupportedTorchError
from dcp_fsdp_osd.storage.location import is_local, local_path
from dcp_fsdp_osd.storage.memory import view_bytes
from dcp_fsdp_osd.storage.redact import display_url
from dcp_fsdp_osd.tools.opened import (
    Checkpoint,
    Part,
    Progress,
    missing_key,
    no_progress,
)
from dcp_fsdp_osd.tree import Path as KeyPath
from dcp_fsdp_osd.tree import dotted

__all__ = ["SAFETENSORS", "Exported", "export_safetensors", "export_torch", "new_file"]

_WINDOW = 64 << 20  # eight requests at a time; two of them are held
# Names of dtypes in safetensors' header.
SAFETENSORS = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    **{
        getattr(torch, name): text
        for name, text in (
            ("uint16", "U16"),
            ("uint32", "U32"),
            ("uint64", "U64"),
            ("float8_e4m3fn", "F8_E4M3"),
            ("float8_e5m2", "F8_E5M2"),
            ("float8_e8m0fnu", "F8_E8M0"),
        )
        if hasattr(torch, name)
    },
}


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        path: the file.
        nbytes: its length.
        tensors, objects: how many entries are in it.
        left_out: keys of objects, which a file of tensors cannot hold.
    """

    path: str
    nbytes: int
    tensors: int
    objects: int
    left_out: tuple[str, ...] = ()


def export_torch(
    checkpoint: Checkpoint,
    path: str | os.PathLike[str],
    *,
    key: str | None = None,
    overwrite: bool = False,
    progress: Progress = no_progress,
) -> Exported:
    """Write a file that ``torch.load(path, weights_only=True)`` reads: the nested state dict.

    Its shape is that of the dict that was saved, or, with `key` (``"model"``), of what lies there
    in it.  ``torch.save`` writes the file's structure without the elements, which are then streamed
    to where they belong; so its zip holds no CRC-32 of them (``torch.load`` looks at none).

    Raises:
        StorageError: there is no `key`, or reading or writing fails.
        FlatOptimError: an object in it is none that ``weights_only=True`` loads.
    """
    below = _below(checkpoint, key)
    tensors = [name for name in below if name in checkpoint.tensors]
    objects = checkpoint.read_objects(name for name in below if name not in checkpoint.tensors)
    with new_file(path, overwrite=overwrite) as temporary:
        # Memory that nobody touches takes no room.
        stand_ins = {
            name: torch.empty(checkpoint.shape(name), dtype=checkpoint.dtype(name))
            for name in tensors
        }
        value = _nested(below, {**stand_ins, **objects})
        with torch.serialization.skip_data():
            torch.save(value, temporary)
        places, others = _places(temporary, value, stand_ins)
        del value, stand_ins
        with temporary.open("r+b", buffering=0) as file:
            for begin, tensor in others:  # of objects, which are in memory anyway
                raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
                _write(file, begin, view_bytes(raw))
            _stream(checkpoint, places, file, progress)
            size = file.seek(0, os.SEEK_END)
    return Exported(os.fspath(path), size, len(tensors), len(objects))


def export_safetensors(
    checkpoint: Checkpoint,
    path: str | os.PathLike[str],
    *,
    key: str | None = None,
    overwrite: bool = False,
    progress: Progress = no_progress,
) -> Exported:
    """Write a file of safetensors: the tensors by their keys, below `key` if given.

    Objects (``step``, param groups) cannot be in it; they are named in what is returned.

    Raises:
        StorageError: there is no `key`, or reading or writing fails.
        ValueError: a dtype that safetensors does not have.
    """
    below = _below(checkpoint, key)
    tensors = [name for name in below if name in checkpoint.tensors]
    odd = {str(checkpoint.dtype(name)) for name in tensors} - set(map(str, SAFETENSORS))
    if odd:
        raise ValueError(f"safetensors has no dtype {', '.join(sorted(odd))}; export to .pt")
    names = {name: dotted(below[name]) or name.rpartition(".")[2] for name in tensors}
    # Larger elements first, as its own writer orders them: so that each is aligned.
    tensors.sort(key=lambda name: (-checkpoint.dtype(name).itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    places: dict[str, int] = {}
    for name in tensors:
        end = offset + checkpoint.nbytes(name)
        header[names[name]] = {
            "dtype": SAFETENSORS[checkpoint.dtype(name)],
            "shape": list(checkpoint.shape(name)),
            "data_offsets": [offset, end],
        }
        places[name] = offset
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    begin = 8 + len(text)
    with (
        new_file(path, overwrite=overwrite) as temporary,
        temporary.open("wb", buffering=0) as file,
    ):
        _write(file, 0, memoryview(struct.pack("<Q", len(text)) + text))
        file.truncate(begin + offset)
        _stream(checkpoint, {name: begin + at for name, at in places.items()}, file, progress)
    left_out = tuple(name for name in below if name not in checkpoint.tensors)
    return Exported(os.fspath(path), begin + offset, len(tensors), 0, left_out)


def _below(checkpoint: Checkpoint, key: str | None) -> dict[str, KeyPath]:
    """The keys of what is exported, and where each lies below `key`."""
    found: dict[str, KeyPath] = {}
    for name in checkpoint.entries:
        path = checkpoint.path(name)
        if key is None:
            found[name] = path
        elif name == key:
            found[name] = ()
        elif name.startswith(f"{key}."):
            depth = next((d for d in range(1, len(path)) if dotted(path[:d]) == key), None)
            # Where no path was recorded, the name is all there is.
            found[name] = (name[len(key) + 1 :],) if depth is None else path[depth:]
    if not found:
        assert key is not None
        raise missing_key(checkpoint, key)
    return found


@contextlib.contextmanager
def new_file(path: str | os.PathLike[str], *, overwrite: bool) -> Iterator[Path]:
    """A temporary file beside `path`, which gets that name when the block ends without an error.

    Raises:
        StorageError: there is a file, and not `overwrite`; or there is no folder for it.
    """
    text = os.fspath(path)
    if not is_local(text):
        raise StorageError(f"expected a local path to write to, found {display_url(text)!r}")
    target = Path(local_path(text))
    if not target.parent.is_dir():
        raise StorageError(f"{target}: the folder {target.parent} does not exist")
    if target.is_dir() or (target.exists() and not overwrite):
        raise StorageError(f"{target} exists; write elsewhere, or ask to overwrite it")
    temporary = target.with_name(f"{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _stream(
    checkpoint: Checkpoint, places: Mapping[str, int], file: BinaryIO, progress: Progress
) -> None:
    """Write each tensor's elements to its place in the file: a window while the next is read."""
    tensors = sorted(places, key=lambda name: places[name])
    windows = checkpoint.windows(tensors, _WINDOW)
    room, other = checkpoint.room(windows), checkpoint.room(windows)
    total, done = sum(map(checkpoint.nbytes, tensors)), 0

    def write(parts: Sequence[Part], read: Sequence[torch.Tensor]) -> int:
        for part, flat in zip(parts, read, strict=True):
            at = places[part.key] + part.start * flat.element_size()
            _write(file, at, view_bytes(flat))
        return sum(flat.nbytes for flat in read)

    with ThreadPoolExecutor(1) as writer:
        writing: Future[int] | None = None
        for parts in windows:
            read = checkpoint.read_parts(parts, room)
            if writing is not None:  # of the other buffer, which is free afterwards
                done += writing.result()
                progress(done, total)
            writing = writer.submit(write, parts, read)
            room, other = other, room
        if writing is not None:
            progress(done + writing.result(), total)


def _write(file: BinaryIO, at: int, data: memoryview) -> None:
    while data:
        written = os.pwrite(file.fileno(), data, at)
        at += written
        data = data[written:]


# ---- torch.save ----


def _nested(below: Mapping[str, KeyPath], values: Mapping[str, Any]) -> Any:
    """The values, by key, as the state dict that has them at their paths."""
    tree: dict[str | int, Any] = {}
    for name, path in below.items():
        if not path:
            return values[name]
        node = tree
        for step in path[:-1]:
            node = node.setdefault(step, {})
        node[path[-1]] = values[name]
    # What stands in lists is not to be taken for part of the tree.
    leaves = {id(value) for value in values.values()}
    return _with_lists(tree, leaves)


def _with_lists(node: Any, leaves: set[int]) -> Any:
    """Where DCP made paths of lists, it left numbers; of mappings, texts."""
    if not isinstance(node, dict) or id(node) in leaves:
        return node
    made = {step: _with_lists(value, leaves) for step, value in node.items()}
    if made and all(isinstance(step, int) for step in made) and set(made) == set(range(len(made))):
        return [made[number] for number in range(len(made))]
    return made


def _places(
    file: Path, value: Any, stand_ins: Mapping[str, torch.Tensor]
) -> tuple[dict[str, int], list[tuple[int, torch.Tensor]]]:
    """Where in the file the elements of each of `stand_ins` belong, as ``torch.load`` finds them;
    and the storages of all other tensors in `value`.

    The file is mapped, not read: storages lie in memory in the order of their records.
    """
    try:
        loaded = torch.load(file, mmap=True, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise FlatOptimError(
            "not exported: an object in the checkpoint is none that "
            f"torch.load(weights_only=True) takes; export a part of it by its key ({reason[:300]})"
        ) from None
    ours, theirs = list(_tensors(value)), list(_tensors(loaded))
    starts = sorted({each.untyped_storage().data_ptr() for each in theirs if each.nbytes})
    begins = _records(file)
    if len(begins) != len(starts) or len(ours) != len(theirs):
        raise UnsupportedTorchError(
            f"torch {torch.__version__}: expected a record for each of {len(starts)} storages in "
            f"the file of torch.save, found {len(begins)}; export to safetensors"
        )
    begin_of = dict(zip(starts, begins, strict=True))
    names = {id(tensor): name for name, tensor in stand_ins.items()}
    places: dict[str, int] = {}
    others: list[tuple[int, torch.Tensor]] = []
    for tensor, twin in zip(ours, theirs, strict=True):
        if twin.nbytes:
            begin = begin_of[twin.untyped_storage().data_ptr()]
            if id(tensor) in names:
                places[names[id(tensor)]] = begin
            else:
                others.append((begin, tensor))
    return places, others


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested mappings and lists, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _records(file: Path) -> list[int]:
    """Where the data of the storages that are not empty begin in a file of ``torch.save``."""
    begins = []
    with zipfile.ZipFile(file) as archive, file.open("rb") as stream:
        for record in archive.infolist():
            folder, _, number = record.filename.rpartition("/")
            if record.file_size and number.isdecimal() and folder.endswith("/data"):
                stream.seek(record.header_offset + 26)  # the local header's lengths
                lengths = struct.unpack("<HH", stream.read(4))
                begins.append(record.header_offset + 30 + sum(lengths))
    return sorted(begins)
