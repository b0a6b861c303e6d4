"""Plans that are pickled compressed are the plans that they were."""

from __future__ import annotations

import copy
import dataclasses
import gc
import itertools
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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

from benchmarks.repeated_saves import Rank, llama
from dcp_fsdp_osd.compact import compact, dump_strings, load_strings, numbers
from dcp_fsdp_osd.layout import simulate


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


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(0, 40), max_size=60), max_size=6))
def test_strings_come_back_in_whatever_order(drawn: list[list[int]]) -> None:
    value = [[f"name {n}" for n in row] for row in drawn]
    named = {f"name {n}": tuple(row) for n, row in enumerate(value)}
    assert load_strings(*dump_strings((value, named))) == (value, named)


@pytest.mark.parametrize("flat", [True, False], ids=["flat", "use_orig_params"])
@pytest.mark.parametrize("world, rank", [(256, 255), (1024, 1005), (4096, 438)])
def test_what_a_rank_sends_is_small(flat: bool, world: int, rank: int) -> None:
    """Of ranks that hold the most: the end of one parameter, and small ones."""
    sent = Rank(simulate(llama(flat), world_size=world, rank=rank), rank).plan(1, False)
    assert len(sent) < 3000


@settings(deadline=None)
@given(st.lists(st.integers(-9, 9), max_size=8), st.integers(0, 5), st.integers(-3, 5))
def test_ranks_are_ranges_where_they_can_be(values: list[int], count: int, step: int) -> None:
    for each in (values, [values[0] + k * step for k in range(count)] if values else []):
        found = numbers(each)
        assert list(found) == each and found == numbers(tuple(each))
        even = len({b - a for a, b in itertools.pairwise(each)}) == 1
        assert isinstance(found, range) == (len(each) > 2 and even and each[1] > each[0])
