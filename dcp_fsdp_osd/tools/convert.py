"""Into checkpoints: from one file of ``torch.save`` or safetensors, or from another checkpoint cut
anew.  What is written goes through :class:`StreamingWriter`, as it is read.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from dcp_fsdp_osd.errors import CorruptCheckpointError, StorageError
from dcp_fsdp_osd.layout.geometry import Box, narrowed_view
from dcp_fsdp_osd.storage.redact import display_url
from dcp_fsdp_osd.storage.store import Backend
from dcp_fsdp_osd.storage.writer import StreamingWriter
from dcp_fsdp_osd.tools.describe import entry_infos
from dcp_fsdp_osd.tools.export import SAFETENSORS
from dcp_fsdp_osd.tools.opened import Checkpoint, Progress, no_progress

__all__ = ["CHUNK", "Written", "cut_boxes", "import_file", "rechunk"]

CHUNK = 32 << 20
"""Most bytes of the boxes that tensors are cut into.  About six of them are in memory at a time:
one of each file that is written, and what is on its way to storage.
"""
_ZIP = b"PK\x03\x04"
_MOST_HEADER = 100 << 20  # of safetensors, as its own reader has it
_THREADS = 2
_SMALL = 1 << 16  # bytes of an object that is read with others
_PART = 8 << 20


@dataclass(frozen=True)
class Written:
    """What was written.

    Attributes:
        url: fit to be shown.
        nbytes: of all tensors' elements.
        tensors, objects, chunks: how many there are.
    """

    url: str
    nbytes: int
    tensors: int
    objects: int
    chunks: int


def rechunk(
    checkpoint: Checkpoint,
    target: str | os.PathLike[str],
    *,
    chunk_bytes: int = CHUNK,
    overwrite: bool = False,
    backend: Backend = "auto",
    storage_options: Mapping[str, Any] | None = None,
    progress: Progress = no_progress,
) -> Written:
    """Write the same state as another checkpoint, in chunks of up to `chunk_bytes` each.

    Whatever was recorded about the state (paths, optimizers) goes with it; checksums are added
    where there were none.

    Raises:
        StorageError: a checkpoint is at `target` already, and not `overwrite`; or storage fails.
        CorruptCheckpointError: the source is damaged; nothing is left at `target` then.
    """
    small = [
        index.fqn
        for index, info in entry_infos(checkpoint)
        if index.fqn not in checkpoint.tensors and info.length <= _SMALL
    ]
    known = checkpoint.read_bytes(small)

    def read_bytes(key: str) -> bytes:
        return known[key] if key in known else checkpoint.read_bytes([key])[key]

    source = _Source(
        {
            key: (stored.properties, checkpoint.shape(key))
            for key, stored in checkpoint.tensors.items()
        },
        list(checkpoint.entries),
        checkpoint.metadata.planner_data,
        read=checkpoint.read_box,
        read_bytes=read_bytes,
        chunk_bytes=chunk_bytes,
        progress=progress,
    )
    return _write(source, target, overwrite, backend, storage_options)


def import_file(
    path: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    key: str | None = None,
    chunk_bytes: int = CHUNK,
    overwrite: bool = False,
    backend: Backend = "auto",
    storage_options: Mapping[str, Any] | None = None,
    progress: Progress = no_progress,
) -> Written:
    """Write a checkpoint of what is in a file of ``torch.save`` or safetensors.

    The file is mapped, not read into memory.  What is in it lies at `key` (``"model"``) in the
    checkpoint's state dict, or is all of it.

    Raises:
        StorageError: the file is neither, or is damaged; or as :func:`rechunk`.
    """
    value = _mapped(Path(path))
    if key is not None:
        value = {key: value}
    planner = DefaultSavePlanner()
    planner.set_up_planner(value, None, True)
    flat: dict[str, Any] = planner.state_dict
    tensors = {name: each.detach() for name, each in flat.items() if isinstance(each, torch.Tensor)}

    def read(name: str, box: Box) -> torch.Tensor:
        return narrowed_view(tensors[name], box.offsets, box.sizes)

    def read_bytes(name: str) -> bytes:
        stream = io.BytesIO()
        torch.save(flat[name], stream)
        return stream.getvalue()

    source = _Source(
        {
            name: (TensorProperties.create_from_tensor(tensor), tuple(tensor.shape))
            for name, tensor in tensors.items()
        },
        list(flat),
        planner.mappings,
        read=read,
        read_bytes=read_bytes,
        chunk_bytes=chunk_bytes,
        progress=progress,
    )
    return _write(source, target, overwrite, backend, storage_options)


def _write(
    source: _Source,
    target: str | os.PathLike[str],
    overwrite: bool,
    backend: Backend,
    storage_options: Mapping[str, Any] | None,
) -> Written:
    """What ``dcp.save`` does, on one rank and without asking whether there are others."""
    writer = StreamingWriter(
        target,
        overwrite=overwrite,
        concurrency=_THREADS,
        part_size=_PART,
        max_inflight_bytes=64 << 20,
        backend=backend,
        storage_options=storage_options,
    )
    writer.set_up_storage_writer(True)
    plan = writer.prepare_local_plan(source.create_local_plan())
    plans, metadata = source.create_global_plan([plan])
    (plan,) = writer.prepare_global_plan(plans)
    results = writer.write_data(source.finish_plan(plan), source).wait()
    writer.finish(metadata, [results])
    return Written(
        display_url(os.fspath(target)),
        source.total,
        len(source.tensors),
        len(source.objects),
        sum(item.type != WriteItemType.BYTE_IO for item in plan.items),
    )


class _Source(SavePlanner):
    """Plans a save of tensors that are read when their turn to be written comes.

    Args:
        tensors: key -> properties and shape.
        keys: all keys, in order; those that are no tensor's are objects'.
        planner_data: of the checkpoint's metadata.
        read: a box of a tensor.
        read_bytes: an object as ``torch.save`` writes it.
    """

    def __init__(
        self,
        tensors: Mapping[str, tuple[TensorProperties, tuple[int, ...]]],
        keys: Sequence[str],
        planner_data: Any,
        *,
        read: Callable[[str, Box], torch.Tensor],
        read_bytes: Callable[[str], bytes],
        chunk_bytes: int,
        progress: Progress,
    ) -> None:
        if chunk_bytes < 1:
            raise ValueError(f"expected chunk_bytes to be 1 at least, found {chunk_bytes}")
        self.tensors, self._keys, self._planner_data = tensors, keys, planner_data
        self.objects = [key for key in keys if key not in tensors]
        self._read, self._read_bytes, self._progress = read, read_bytes, progress
        self._chunk_bytes = chunk_bytes
        self.total = sum(
            math.prod(shape) * properties.dtype.itemsize for properties, shape in tensors.values()
        )
        self._done = 0

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        pass

    def create_local_plan(self) -> SavePlan:
        items = [
            WriteItem(index=MetadataIndex(key), type=WriteItemType.BYTE_IO) for key in self.objects
        ]
        for key, (properties, shape) in self.tensors.items():
            boxes = list(cut_boxes(shape, properties.dtype.itemsize, self._chunk_bytes))
            for number, box in enumerate(boxes):
                offsets, sizes = torch.Size(box.offsets), torch.Size(box.sizes)
                chunk = ChunkStorageMetadata(offsets=offsets, sizes=sizes)
                items.append(
                    WriteItem(
                        index=MetadataIndex(key, offsets, number),
                        type=WriteItemType.SHARD if len(boxes) > 1 else WriteItemType.TENSOR,
                        tensor_data=TensorWriteData(
                            chunk=chunk, properties=properties, size=torch.Size(shape)
                        ),
                    )
                )
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        stored: dict[str, Any] = {}
        for key in self._keys:
            if key in self.tensors:
                properties, shape = self.tensors[key]
                stored[key] = TensorStorageMetadata(properties, torch.Size(shape), [])
            else:
                stored[key] = BytesStorageMetadata()
        for item in all_plans[0].items:
            if item.tensor_data is not None:
                stored[item.index.fqn].chunks.append(item.tensor_data.chunk)
        return all_plans, Metadata(stored, planner_data=self._planner_data)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        key, data = write_item.index.fqn, write_item.tensor_data
        if data is None:
            return io.BytesIO(self._read_bytes(key))
        found = self._read(key, Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes)))
        self._done += found.nbytes
        self._progress(self._done, self.total)
        return found


def cut_boxes(shape: Sequence[int], itemsize: int, most: int) -> Iterator[Box]:
    """Boxes of `most` bytes at most, each contiguous in the tensor, in order; one element at least.

    Pure.
    """
    dim, inner = 0, math.prod(shape[1:]) * itemsize
    while dim < len(shape) - 1 and inner > most:
        dim += 1
        inner = math.prod(shape[dim + 1 :]) * itemsize
    if math.prod(shape) * itemsize <= most or not shape:
        yield Box((0,) * len(shape), tuple(shape))
        return
    step = max(most // inner, 1)
    for outer in itertools.product(*map(range, shape[:dim])):
        for start in range(0, shape[dim], step):
            size = min(step, shape[dim] - start)
            rest = shape[dim + 1 :]
            yield Box((*outer, start, *(0 for _ in rest)), (*(1 for _ in outer), size, *rest))


# ---- files ----


def _mapped(path: Path) -> dict[str, Any]:
    """What is in a file, its tensors in mapped memory."""
    with path.open("rb") as file:
        head = file.read(9)
    if head[:4] == _ZIP:
        try:
            value = torch.load(path, mmap=True, map_location="cpu", weights_only=True)
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            raise StorageError(
                f"{path}: torch.load(weights_only=True) does not take it: {reason}"
            ) from None
        if not isinstance(value, Mapping):
            raise StorageError(f"{path}: expected a state dict, found {type(value).__name__}")
        return dict(value)
    if head[8:] == b"{":
        return _safetensors(path)
    raise StorageError(
        f"{path}: expected a file of safetensors, or of torch.save in its zip format, found one "
        f"that begins with {head!r}"
    )


def _safetensors(path: Path) -> dict[str, Any]:
    dtypes = {text: dtype for dtype, text in SAFETENSORS.items()}
    size = path.stat().st_size
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > min(size - 8, _MOST_HEADER):
            raise CorruptCheckpointError(f"{path}: a header of {length} bytes in {size}: cut off?")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            described = {
                name: (dtypes[each["dtype"]], tuple(each["shape"]), *each["data_offsets"])
                for name, each in header.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptCheckpointError(
                f"{path}: its header is none of safetensors' ({type(error).__name__}: {error})"
            ) from error
    begin, found = 8 + length, {}
    whole = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    for name, (dtype, shape, start, end) in described.items():
        wanted = math.prod(shape) * dtype.itemsize
        if not 0 <= start <= end <= size - begin or end - start != wanted:
            raise CorruptCheckpointError(
                f"{path}: {name}: expected {wanted} bytes within the file's {size - begin} of "
                f"data, found bytes {start} to {end}: the file was cut off or altered"
            )
        raw = whole[begin + start : begin + end]
        if (begin + start) % dtype.itemsize:
            raw = raw.clone()  # torch takes no elements that are not aligned
        found[name] = raw.view(dtype).view(shape)
    return found
