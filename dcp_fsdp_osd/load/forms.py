"""Loads into an empty dict in the sharded and the full form: FQN keys, for stock's setters."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from dcp_fsdp_osd.allocate import empty_for_reading
from dcp_fsdp_osd.containers import remade
from dcp_fsdp_osd.fsdp.optim import ShardGroup
from dcp_fsdp_osd.layout.flat import Piece
from dcp_fsdp_osd.layout.geometry import Box
from dcp_fsdp_osd.load.match import placed_for
from dcp_fsdp_osd.load.optim import OptimLoad
from dcp_fsdp_osd.load.plan import check_params
from dcp_fsdp_osd.load.schedule import Leaf, LoadSchedule, covering_reads, object_item, whole_chunk
from dcp_fsdp_osd.tree import set_leaf

__all__ = ["FormLoad"]


class FormLoad(OptimLoad):
    """Fills an empty dict with what ``get_optimizer_state_dict`` would return.

    Keys, groups and their order are the checkpoint's. ``form``: ``"full"``: whole tensors on the
    CPU; ``"sharded"``: for a parameter that FSDP1 shards a DTensor (where it was given a mesh)
    or a ShardedTensor cut by rows, for one that is a DTensor its like, else a whole tensor.
    With ``idle`` this rank reads nothing and its dict stays empty.
    """

    form: str = "full"
    idle: bool = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._fqn_of: dict[str, str] = {}  # key of an entry -> the parameter that it is state of

    def plan(self) -> LoadSchedule:
        self.schedule = schedule = check_params(
            self.target,
            self.index,
            key=self.key,
            quantized=self.quantized,
            optim_class=self.optim_class,
        )
        if self.idle:
            return schedule
        unknown = set(self.index.state) - set(self.names())
        skipped = {fqn for i in schedule.keep for fqn in self.layout.params[i].fqns}
        dropped = unknown.union(*map(self.layout.names_of, skipped | schedule.skip))
        keys = [
            key
            for name, paths in self.index.state.items()
            if name not in dropped
            for key in paths.values()
        ]
        keys += self.index.extra.values()
        keys += [key for paths in self.index.groups.values() for key in paths.values()]
        keys += self.index.whole_objects()
        self._fqn_of = {
            key: fqn
            for name, paths in self.index.state.items()
            if (fqn := self.layout.resolve(name)) is not None
            for key in paths.values()
        }
        for key in keys:
            storage = self.index.tensors.get(key)
            number = self.layout.ids.get(self._fqn_of.get(key, ""))
            leaf = Leaf("object", number, key, self.index.paths[key], {key: key})
            schedule.leaves.append(leaf)
            if storage is None:
                schedule.items.append(object_item(key))
            else:
                self._plan_tensor(leaf, storage)
        return schedule

    def _plan_tensor(self, leaf: Leaf, storage: TensorStorageMetadata) -> None:
        leaf.kind, leaf.shape, leaf.dtype = "whole", tuple(storage.size), storage.properties.dtype
        chunk = whole_chunk(storage)
        number = leaf.param
        placed = self.index.info.placed if self.index.info is not None else {}
        if number is not None and self.form == "sharded" and (leaf.shape or leaf.name in placed):
            param = self.target.params[number]
            group = self._shard_group(leaf.name)
            leaf.like = placed_for(param, storage, placed.get(leaf.name), None)
            if leaf.like is not None:
                leaf.kind = "dtensor"
                self._want(leaf, storage, leaf.like.chunks())
                return
            if group is not None and leaf.shape:
                leaf.kind = "sharded"
                box = group.box(leaf.shape)
                chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
        self._want(leaf, storage, [chunk])

    def _want(
        self, leaf: Leaf, storage: TensorStorageMetadata, chunks: list[ChunkStorageMetadata]
    ) -> None:
        for chunk in chunks:
            piece = Piece(Box(tuple(chunk.offsets), tuple(chunk.sizes)), 0)
            index = MetadataIndex(leaf.name, chunk.offsets)
            leaf.pieces[index] = piece
            self.schedule.destinations[index] = (leaf, None)
        self.schedule.items += covering_reads(leaf.name, storage, chunks)

    def _shard_group(self, key: str) -> ShardGroup | None:
        """Over whom FSDP1 shards the parameter that an entry is state of."""
        return self.target.shards.get(self._fqn_of.get(key, ""))

    def allocate(self) -> None:
        for leaf in self.schedule.leaves:
            if leaf.kind == "object":
                continue
            if leaf.like is not None:
                leaf.tensor = leaf.like.empty(leaf.dtype)
                continue
            (piece,) = (p for p in leaf.pieces.values() if p is not None)
            leaf.tensor = empty_for_reading(piece.box.sizes, leaf.dtype, self._place(leaf))

    def _place(self, leaf: Leaf) -> torch.device:
        if leaf.like is not None:
            return leaf.like.device
        sharded = self.form == "sharded" and leaf.param is not None and leaf.shape
        return self._device(leaf) if sharded else torch.device("cpu")

    def finish(self) -> None:
        if self.idle:
            return
        for leaf in self.schedule.leaves:
            value: Any = leaf.tensor
            if leaf.kind == "object":
                value = self.objects[leaf.name]
            elif leaf.kind == "sharded" and leaf.param is not None and leaf.tensor is not None:
                group = self._shard_group(leaf.name)
                value = group.tensor(leaf.tensor, leaf.shape) if group is not None else value
            set_leaf(self._result, leaf.path, value)
        self._result = remade(self._result, self.index.containers)
        if self.index.flattened:
            return
        state = self._result.get("state", {})
        self._result["state"] = {self._fqn(name) or name: value for name, value in state.items()}
        known: set[str] = set()
        for group in self._result.setdefault("param_groups", []):
            if "params" in group:
                group["params"] = [self._fqn(str(name)) or name for name in group["params"]]
                known.update(group["params"])
        if self.index.known_groups() is None:  # else it was a problem of the plan
            lacking = (fqn for fqn in self.layout.ids if self._lacks(fqn, known))
            self._refuse([], [f"{fqn}: not in the checkpoint" for fqn in lacking])
