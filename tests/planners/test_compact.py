"""Plans that are pickled compressed are the plans that they were."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from dcp_fsdp_osd.compact import compact


def _save_plan() -> SavePlan:
    items = []
    for number in range(200):
        index = MetadataIndex(f"optim.state.layers.{number // 4}.weight.exp_avg", (number, 0))
        chunk = ChunkStorageMetadata(torch.Size((number, 0)), torch.Size((3, 64)))
        data = TensorWriteData(chunk, TensorProperties(torch.float32), torch.Size((900, 64)))
        items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
    return SavePlan(items, storage_data=("ticket", 3), planner_data={"a": b"b"})


def _load_plan() -> LoadPlan:
    items = []
    for number in range(200):
        index = MetadataIndex(f"optim.state.layers.{number // 4}.weight.exp_avg", (number, 0), 7)
        where = torch.Size((number, 0))
        items.append(ReadItem(LoadItemType.TENSOR, index, where, index, where, torch.Size((3, 64))))
    return LoadPlan(items, storage_data=None, planner_data=[1, None])


@pytest.mark.parametrize("plan", [_save_plan(), _load_plan()], ids=["save", "load"])
def test_a_plan_is_what_it_was(plan: Any) -> None:
    small = compact(plan)
    assert isinstance(small, type(plan))
    sent = pickle.dumps(small)
    assert len(sent) < len(pickle.dumps(plan)) / 4
    changed = dataclasses.replace(small, storage_data="other")
    for found in (small, pickle.loads(sent), copy.deepcopy(small), compact(small)):
        assert [(f.name, getattr(found, f.name)) for f in dataclasses.fields(found)] == [
            (f.name, getattr(plan, f.name)) for f in dataclasses.fields(plan)
        ]
    assert pickle.loads(pickle.dumps(changed)).storage_data == "other"
    # Hints are left out of comparisons of indices.
    one, two = pickle.loads(sent).items[0], plan.items[0]
    for name in ("index", "dest_index"):
        if hasattr(two, name):
            assert getattr(one, name).index == getattr(two, name).index


@pytest.mark.parametrize("on", [True, False])
def test_the_collector_is_left_as_it_was(on: bool) -> None:
    sent = pickle.dumps(compact(_load_plan()))
    was = gc.isenabled()
    (gc.enable if on else gc.disable)()
    try:
        pickle.loads(sent)
        assert gc.isenabled() is on
    finally:
        (gc.enable if was else gc.disable)()
