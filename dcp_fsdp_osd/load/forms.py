"""Loads into an empty dict in the sharded and the full form: FQN keys, for stock's setters."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dcp_fsdp_osd.allocate import empty_for_reading
from dcp_fsdp_osd.containers import remade
from dcp_fsdp_osd.errors import Mismatch
from dcp_fsdp_osd.fsdp.optim import ShardGroup
from dcp_fsdp_osd.load.match import placed_for
from dcp_fsdp_osd.load.optim import OptimLoad
from dcp_fsdp_osd.load.plan import check_params
from dcp_fsdp_osd.load.protocol import Form
from dcp_fsdp_osd.load.schedule import Kind, Leaf, LoadSchedule, chunk_of, whole_chunk
from dcp_fsdp_osd.misuse.flat_form import expect_setter
from dcp_fsdp_osd.tree import set_leaf

__all__ = ["FormLoad"]


class FormLoad(OptimLoad):
    """Fills an empty dict with what ``get_optimizer_state_dict`` would return.

    Keys, groups and their order are the checkpoint's.

    Args:
        form: ``"full"``: whole tensors on the CPU; ``"sharded"``: for a parameter that FSDP1 shards
            a DTensor (where it was given a mesh) or a ShardedTensor cut by rows, for one that is a
            DTensor its like, else a whole tensor.
        idle: this rank reads nothing, and its dict stays empty.
        options: as of ``OptimLoad``.
    """

    def __init__(self, *args: Any, form: Form, idle: bool, **options: Any) -> None:
        super().__init__(*args, **options)
        self._form = form
        self._idle = idle
        self._fqn_of: dict[str, str] = {}  # key of an entry -> the parameter that it is state of

    def plan(self) -> LoadSchedule:
        self.schedule = schedule = check_params(
            self.target,
            self.index,
            key=self.key,
            codec=self.codec,
            optim_class=self.optim_class,
        )
        if self._idle:
            return schedule
        states = self.index.state
        fqns = {fqn for number in schedule.keep for fqn in self.layout.params[number].fqns}
        dropped = set(states) - set(self.report().names)
        dropped.update(*map(self.layout.names_of, fqns | schedule.skip))
        keys = [k for name, paths in states.items() if name not in dropped for k in paths.values()]
        keys += self.index.extra.values()
        keys += [key for paths in self.index.groups.values() for key in paths.values()]
        keys += self.index.whole_objects()
        self._fqn_of = {
            key: fqn
            for name, paths in states.items()
            if (fqn := self.layout.resolve(name)) is not None
            for key in paths.values()
        }
        for key in keys:
            storage = self.index.tensors.get(key)
            number = self.layout.ids.get(self._fqn_of.get(key, ""))
            where = number, key, self.index.paths[key], {key: key}
            if storage is None:
                schedule.add_objects(*where)
            else:
                self._plan_tensor(Leaf(Kind.WHOLE, *where), storage)
        return schedule

    def _plan_tensor(self, leaf: Leaf, storage: TensorStorageMetadata) -> None:
        chunks = [whole_chunk(storage)]
        record = self.info.placed.get(leaf.name)
        placed = storage.size or record is not None
        if self._form == "sharded" and leaf.param is not None and placed:
            leaf.like = placed_for(self.target.params[leaf.param], storage, record, None)
            group = self._shard_group(leaf.name)
            if leaf.like is not None:
                leaf.kind, chunks = Kind.DTENSOR, list(leaf.like.chunks())
            elif group is not None and storage.size:
                box = group.box(tuple(storage.size))
                leaf.kind, chunks = Kind.SHARDED, [chunk_of(box.offsets, box.sizes)]
        self.schedule.add_tensor(leaf, storage, [(None, chunk) for chunk in chunks])

    def _shard_group(self, key: str) -> ShardGroup | None:
        """Over whom FSDP1 shards the parameter that an entry is state of."""
        return self.target.shards.get(self._fqn_of.get(key, ""))

    def _empty(self, leaf: Leaf) -> torch.Tensor:
        shape, group = leaf.shape, self._shard_group(leaf.name)
        if leaf.kind is Kind.SHARDED and group is not None:
            shape = group.box(leaf.shape).sizes
        return empty_for_reading(shape, leaf.dtype, self._device(leaf))

    def _device(self, leaf: Leaf) -> torch.device:
        if leaf.like is not None:
            return leaf.like.device
        sharded = self._form == "sharded" and leaf.param is not None and leaf.shape
        return super()._device(leaf) if sharded else torch.device("cpu")

    def finish(self) -> None:
        if self._idle:
            return
        result: dict[str, Any] = {}
        for leaf in self.schedule.leaves:
            value: Any = leaf.tensor
            group = self._shard_group(leaf.name)
            if leaf.kind is Kind.OBJECT:
                value = self.objects[leaf.name]
            elif leaf.kind is Kind.SHARDED and leaf.tensor is not None and group is not None:
                value = group.tensor(leaf.tensor, leaf.shape)
            set_leaf(result, leaf.path, value)
        self._result = remade(result, self.index.containers)
        if self.index.flattened:
            return
        state = self._result.get("state", {})
        self._result["state"] = {self.fqn(name): value for name, value in state.items()}
        known: set[str] = set()
        for group in self._result.setdefault("param_groups", []):
            if "params" in group:
                group["params"] = [self.fqn(str(name)) for name in group["params"]]
                known.update(group["params"])
        if self.index.known_groups() is None:  # else it was a mismatch of the plan
            self._refuse([], list(map(Mismatch, self._lacking(self.layout.ids, known))))

    def hand_over(self) -> None:
        super().hand_over()
        expect_setter(self.optim, self.layout, self._form)
