"""One model's load on one rank: reads go into the model's own memory."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from dcp_fsdp_osd.allocate import empty_for_reading
from dcp_fsdp_osd.checkpoint import SavedInfo
from dcp_fsdp_osd.containers import Containers, containers_of, remade
from dcp_fsdp_osd.errors import Mismatch
from dcp_fsdp_osd.layout.flat import Segment
from dcp_fsdp_osd.layout.geometry import Box, narrowed_view
from dcp_fsdp_osd.load.protocol import LoadReport
from dcp_fsdp_osd.load.schedule import Kind, Leaf, LoadSchedule, Want, chunk_of, whole_chunk
from dcp_fsdp_osd.stateful.guard import GUARD_KEY, without_guard
from dcp_fsdp_osd.stateful.model import ModelGuard
from dcp_fsdp_osd.tree import Path, set_leaf

__all__ = ["ModelLoad"]

_LocalBox = tuple[Box, torch.Tensor]
"""A box of a whole tensor, and the memory (of the box's shape) that this rank has of it."""


def _local_boxes(value: Any, segment: Segment | None) -> tuple[tuple[int, ...], list[_LocalBox]]:
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
    """Loads the dict of a :class:`FlatModelState`; a
    :class:`~dcp_fsdp_osd.load.protocol.StateLoad`.

    Args:
        path: of the model in state dict and checkpoint.
        value: the dict that is loaded: its tensors by the reads, its extra states by
            ``hand_over``.
        metadata: of the checkpoint.

    What is wanted, and what of it the checkpoint lacks, is known from metadata alone, so that
    nothing is allocated (but for extra states), and ``finish`` finds nothing wrong.
    """

    def __init__(self, path: tuple[str, ...], value: dict[str, Any], *, metadata: Metadata) -> None:
        self.path = path
        self.guard: ModelGuard = value[GUARD_KEY]
        self.guard.check()
        self.current = without_guard(value)
        self.schedule = LoadSchedule()
        self.late: list[Mismatch] = []
        self._value = value
        self._saved = _saved_under(metadata, path)
        self._sorted = sorted(self._saved)
        info = SavedInfo.unpack(metadata.planner_data, ".".join(path))
        known = info.containers if info is not None else None
        self._containers = None if known is None else Containers.unpack(known)
        self._objects: dict[str, Any] = {}
        self._views: dict[MetadataIndex, torch.Tensor] = {}

    def report(self) -> LoadReport:
        extra = (n for name in self.current if self._is_extra(name) for n in self._entries_of(name))
        names = (*self.current, *extra)
        mismatches = tuple(self.schedule.mismatches)
        return LoadReport(mismatches, names, tuple(self._saved), "model has no such entry")

    def _is_extra(self, name: str) -> bool:
        """Whether it may be anything, and is read into memory of its own."""
        tensor = isinstance(self.current[name], torch.Tensor | ShardedTensor)
        return name in self.guard.extra or not tensor

    def _entries_of(self, name: str) -> Iterator[str]:
        """An extra state may be a mapping, which lies in the checkpoint by its leaves."""
        if name in self._saved:
            yield name
        inside = itertools.islice(self._sorted, bisect.bisect(self._sorted, name + "."), None)
        yield from itertools.takewhile(lambda entry: entry.startswith(name + "."), inside)

    def plan(self) -> LoadSchedule:
        tied: dict[str, list[str]] = {}
        for name in self.current:
            if self._is_extra(name):
                self._plan_extra(name)
            else:
                tied.setdefault(self.guard.tied.get(name, name), []).append(name)
        for names in tied.values():
            source = next((name for name in names if name in self._saved), None)
            mismatch = (
                Mismatch(", ".join(names))
                if source is None
                else self._plan_value(names[0], self.current[names[0]], self._saved[source])
            )
            if mismatch is not None:
                self.schedule.mismatches.append(mismatch)
        return self.schedule

    def _plan_value(self, name: str, value: Any, saved: _Saved) -> Mismatch | None:
        storage = saved.storage
        if storage is None:
            return Mismatch(name, found="an object in the checkpoint, not a tensor")
        shape, boxes = _local_boxes(value, self.guard.segments.get(name))
        if tuple(storage.size) != shape:
            return Mismatch(name, "", f"shape {tuple(storage.size)}", f"{shape} in the model")
        if any(local.is_meta for _, local in boxes):
            return Mismatch(
                name,
                found="a meta tensor",
                expected="memory to load into",
                remedy="call model.to_empty(device=...) first",
            )
        leaf = Leaf(Kind.MODEL, None, name, (), {name: saved.key})
        wanted: list[Want] = []
        for box, local in boxes:
            if box.numel:
                chunk = chunk_of(box.offsets, box.sizes)
                self._views[MetadataIndex(saved.key, chunk.offsets)] = local.detach()
                wanted.append((None, chunk))
        self.schedule.add_tensor(leaf, storage, wanted)
        return None

    def _plan_extra(self, name: str) -> None:
        entries = list(self._entries_of(name))
        if not entries:
            self.schedule.mismatches.append(Mismatch(name))
        for entry in entries:
            key, storage, path = self._saved[entry]
            if storage is None:
                self.schedule.add_objects(None, name, path, {name: key})
            else:
                leaf = Leaf(Kind.WHOLE, None, name, path, {name: key})
                self.schedule.add_tensor(leaf, storage, [(None, whole_chunk(storage))])

    # ------------------------------------------------------------ allocate, read, finish

    def allocate(self) -> None:
        """Memory for extra states that are tensors; all else is the model's own."""
        for leaf in self.schedule.leaves:
            if leaf.kind is Kind.WHOLE:
                leaf.tensor = empty_for_reading(leaf.shape, leaf.dtype, torch.device("cpu"))

    def place(self, item: ReadItem) -> tuple[torch.dtype | None, torch.device]:
        view = self._views.get(item.dest_index)
        if view is not None:
            return view.dtype, view.device
        leaf = self.schedule.destinations.get(item.dest_index)
        return None if leaf is None else leaf.dtype, torch.device("cpu")

    def destination(self, item: ReadItem) -> torch.Tensor:
        view = self._views.get(item.dest_index)
        if view is None:
            leaf = self.schedule.destinations[item.dest_index]
            view = leaf.tensor if leaf.tensor is not None else torch.empty(0, device="cpu")
        return narrowed_view(view, item.dest_offsets, item.lengths)

    def take_object(self, key: str, value: Any) -> None:
        self._objects[key] = value

    def finish(self) -> None:
        """Nothing is left to be found wrong."""

    def extra_states(self) -> dict[str, Any]:
        """Extra states by name, all reads being done."""
        fresh: dict[str, Any] = {}
        for leaf in self.schedule.leaves:
            if leaf.kind not in (Kind.OBJECT, Kind.WHOLE):
                continue
            (key,) = leaf.sources.values()
            value = self._objects[key] if leaf.kind is Kind.OBJECT else leaf.tensor
            set_leaf(fresh, (leaf.name, *leaf.path), value)
        if self._containers is not None:
            return {name: remade(fresh[name], self._containers.below((name,))) for name in fresh}
        here = {name: containers_of(self.current[name], (name,), strict=False) for name in fresh}
        return {name: remade(fresh[name], here[name]) for name in fresh}

    def hand_over(self) -> None:
        """Put extra states into the dict; ``FlatModelState.load_state_dict`` takes them."""
        self._value.update(self.extra_states())
        self.guard.loaded = True

    def release(self) -> None:
        self.schedule.clear()
        self._objects.clear()
        self._views.clear()
        self._value, self.current = {}, {}


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
    saved = {}
    for key, storage in metadata.state_dict_metadata.items():
        where = tuple(paths.get(key) or ())
        elsewhere = len(where) > 1 and where[: len(path)] != path
        if key.startswith(prefix) and not elsewhere:
            tensor = storage if isinstance(storage, TensorStorageMetadata) else None
            saved[key[len(prefix) :]] = _Saved(key, tensor, where[len(path) + 1 :])
    return saved
