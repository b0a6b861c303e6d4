"""One model's load on one rank: reads go into the model's own memory."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from dcp_fsdp_osd.allocate import empty_for_reading
from dcp_fsdp_osd.checkpoint import SavedInfo
from dcp_fsdp_osd.containers import Containers, containers_of, remade
from dcp_fsdp_osd.layout.flat import Piece, Segment
from dcp_fsdp_osd.layout.geometry import Box, narrowed_view
from dcp_fsdp_osd.load.schedule import Leaf, LoadSchedule, covering_reads, object_item, whole_chunk
from dcp_fsdp_osd.stateful.guard import GUARD_KEY, without_guard
from dcp_fsdp_osd.stateful.model import ModelGuard
from dcp_fsdp_osd.tree import Path, set_leaf

__all__ = ["LocalBox", "ModelLoad", "local_boxes"]

LocalBox = tuple[Box, torch.Tensor]
"""A box of a whole tensor, and the memory (of the box's shape) that this rank has of it."""


def local_boxes(value: Any, segment: Segment | None) -> tuple[tuple[int, ...], list[LocalBox]]:
    """The whole shape of a value, and what this rank holds of it. Views, no copies.

    Args:
        value: this rank's elements (1-D) of ``segment``; or a ShardedTensor, a DTensor or a
            whole tensor.
    """
    if segment is not None:
        return segment.shape, [(p.box, p.view(value)) for p in segment.pieces() if segment.numel]
    shape = tuple(value.size())
    if isinstance(value, ShardedTensor):
        return shape, [
            (Box(tuple(s.metadata.shard_offsets), tuple(s.metadata.shard_sizes)), s.tensor)
            for s in value.local_shards()
        ]
    if hasattr(value, "__create_chunk_list__"):  # a DTensor, or another subclass of that kind
        boxes = []
        for chunk in value.__create_chunk_list__():
            local = value.__get_tensor_shard__(MetadataIndex("", chunk.offsets))
            boxes.append((Box(tuple(chunk.offsets), tuple(chunk.sizes)), local))
        return shape, boxes
    return shape, [(Box((0,) * len(shape), shape), value)]


class ModelLoad:
    """Loads the dict of a :class:`FlatModelState`, as ``OptimLoad`` does an optimizer's.

    Args:
        path: of the model in state dict and checkpoint.
        value: the dict that is loaded: its tensors by the reads, its extra states by
            ``hand_over``.
        metadata: of the checkpoint.

    What is wanted, and what of it the checkpoint lacks, is known from metadata alone, so that
    nothing is allocated (but for extra states), and ``finish`` finds nothing wrong.
    """

    what = "model has no such entry"
    applies = True

    def __init__(self, path: tuple[str, ...], value: dict[str, Any], *, metadata: Metadata) -> None:
        self.path = path
        self.key = ".".join(path)
        self.value = value
        self.guard: ModelGuard = value[GUARD_KEY]
        self.guard.check()
        self.live = without_guard(value)
        self.saved = _saved_under(metadata, path)
        self._sorted = sorted(self.saved)
        info = SavedInfo.unpack(metadata.planner_data, self.key)
        known = info.containers if info is not None else None
        self.containers = None if known is None else Containers.unpack(known)
        self.schedule = LoadSchedule()
        self.objects: dict[str, Any] = {}
        self.late: list[str] = []
        self._views: dict[MetadataIndex, torch.Tensor] = {}

    def names(self) -> list[str]:
        """What this rank has a use for: its names, and the entries of its extra states."""
        return [
            *self.live,
            *(n for name in self.live if self._is_extra(name) for n in self._entries_of(name)),
        ]

    def saved_names(self) -> list[str]:
        """What the checkpoint has of the model."""
        return list(self.saved)

    def _is_extra(self, name: str) -> bool:
        """Whether it may be anything, and is read into memory of its own."""
        tensor = isinstance(self.live[name], torch.Tensor | ShardedTensor)
        return name in self.guard.extra or not tensor

    def _entries_of(self, name: str) -> Iterator[str]:
        """An extra state may be a mapping, which lies in the checkpoint by its leaves."""
        if name in self.saved:
            yield name
        inside = itertools.islice(self._sorted, bisect.bisect(self._sorted, name + "."), None)
        yield from itertools.takewhile(lambda entry: entry.startswith(name + "."), inside)

    def plan(self) -> LoadSchedule:
        tied: dict[str, list[str]] = {}
        for name in self.live:
            if self._is_extra(name):
                self._plan_extra(name)
            else:
                tied.setdefault(self.guard.tied.get(name, name), []).append(name)
        for names in tied.values():
            source = next((name for name in names if name in self.saved), None)
            if source is None:
                self.schedule.problems.append(f"{', '.join(names)}: not in the checkpoint")
            else:
                self._plan_value(names[0], self.live[names[0]], self.saved[source])
        return self.schedule

    def _plan_value(self, name: str, value: Any, saved: _Saved) -> None:
        key, storage = saved.key, saved.storage
        if storage is None:
            self.schedule.problems.append(f"{name}: an object in the checkpoint, not a tensor")
            return
        shape, boxes = local_boxes(value, self.guard.segments.get(name))
        if tuple(storage.size) != shape:
            self.schedule.problems.append(
                f"{name}: shape {tuple(storage.size)} in the checkpoint, {shape} in the model"
            )
            return
        if any(local.is_meta for _, local in boxes):
            self.schedule.problems.append(
                f"{name}: expected memory to load into, found a meta tensor: call "
                f"model.to_empty(device=...) first"
            )
            return
        leaf = Leaf("model", None, name, (), {name: key}, shape, storage.properties.dtype)
        self.schedule.leaves.append(leaf)
        chunks = []
        for box, local in boxes:
            if box.numel:
                chunks.append(ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)))
                self._want(leaf, key, box, local.detach())
        self.schedule.items += covering_reads(key, storage, chunks)

    def _want(self, leaf: Leaf, key: str, box: Box, view: torch.Tensor) -> None:
        index = MetadataIndex(key, torch.Size(box.offsets))
        piece = Piece(box, 0)
        leaf.pieces[index] = piece
        self.schedule.destinations[index] = (leaf, piece)
        self._views[index] = view

    def _plan_extra(self, name: str) -> None:
        entries = list(self._entries_of(name))
        if not entries:
            self.schedule.problems.append(f"{name}: not in the checkpoint")
        for entry in entries:
            key, storage, path = self.saved[entry]
            leaf = Leaf("object", None, name, path, {name: key})
            self.schedule.leaves.append(leaf)
            if storage is None:
                self.schedule.items.append(object_item(key))
                continue
            leaf.kind, leaf.shape, leaf.dtype = "whole", storage.size, storage.properties.dtype
            chunk = whole_chunk(storage)
            leaf.pieces[MetadataIndex(key, chunk.offsets)] = None
            self.schedule.destinations[MetadataIndex(key, chunk.offsets)] = (leaf, None)
            self.schedule.items += covering_reads(key, storage, [chunk])

    # ------------------------------------------------------------ allocate, read, finish

    def allocate(self) -> None:
        """Memory for extra states that are tensors; all else is the model's own."""
        for leaf in self.schedule.leaves:
            if leaf.kind == "whole":
                leaf.tensor = empty_for_reading(leaf.shape, leaf.dtype, torch.device("cpu"))

    def dtype_of(self, name: str) -> torch.dtype:
        """Of the model's own tensor."""
        value: torch.Tensor = self.live[name]
        return value.dtype

    def place(self, item: ReadItem) -> tuple[torch.dtype | None, torch.device]:
        """The dtype and device of what ``item`` is read to."""
        view = self._views.get(item.dest_index)
        if view is not None:
            return view.dtype, view.device
        return self.schedule.destinations[item.dest_index][0].dtype, torch.device("cpu")

    def destination(self, item: ReadItem) -> torch.Tensor:
        view = self._views.get(item.dest_index)
        if view is None:
            leaf, _ = self.schedule.destinations[item.dest_index]
            view = leaf.tensor if leaf.tensor is not None else torch.empty(0)
        return narrowed_view(view, item.dest_offsets, item.lengths)

    def finish(self) -> None:
        """Nothing is left to be found wrong."""

    def extra_states(self) -> dict[str, Any]:
        """Extra states by name, all reads being done."""
        fresh: dict[str, Any] = {}
        for leaf in self.schedule.leaves:
            if leaf.kind not in ("object", "whole"):
                continue
            (key,) = leaf.sources.values()
            value = self.objects[key] if leaf.kind == "object" else leaf.tensor
            if leaf.path:
                set_leaf(fresh, (leaf.name, *leaf.path), value)
            else:
                fresh[leaf.name] = value
        if self.containers is not None:
            return {name: remade(fresh[name], self.containers.below((name,))) for name in fresh}
        here = {name: containers_of(self.live[name], (name,), strict=False) for name in fresh}
        return {name: remade(fresh[name], here[name]) for name in fresh}

    def hand_over(self) -> None:
        """Put extra states into the dict; ``FlatModelState.load_state_dict`` takes them."""
        self.value.update(self.extra_states())
        self.guard.loaded = True

    def release(self) -> None:
        """Let go of all tensors."""
        self.schedule.leaves.clear()
        self.schedule.destinations.clear()
        self.objects.clear()
        self._views.clear()
        self.value, self.live = {}, {}


class _Saved(NamedTuple):
    """An entry of a checkpoint: its key, its storage if it is a tensor, and its path below the
    name (of an extra state that is a mapping)."""

    key: str
    storage: TensorStorageMetadata | None
    path: Path


def _saved_under(metadata: Metadata, path: tuple[str, ...]) -> dict[str, _Saved]:
    """Name below ``path`` -> what the checkpoint has of it, whoever wrote it."""
    paths = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
    prefix = ".".join(path) + "."
    found = {}
    for key, storage in metadata.state_dict_metadata.items():
        where = tuple(paths.get(key) or ())
        elsewhere = len(where) > 1 and where[: len(path)] != path
        if key.startswith(prefix) and not elsewhere:
            tensor = storage if isinstance(storage, TensorStorageMetadata) else None
            found[key[len(prefix) :]] = _Saved(key, tensor, where[len(path) + 1 :])
    return found
