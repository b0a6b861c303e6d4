"""The global plan of regular worlds: that of the general way, and nothing bad gets through it."""

from __future__ import annotations

import dataclasses
import math
import pickle
import warnings
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from dcp_fsdp_osd import FlatOptimSavePlanner, LayoutError
from dcp_fsdp_osd.compact import Lazy
from dcp_fsdp_osd.layout.flat import FlatLayout, ParamKind, Segment, Unit, simulate
from dcp_fsdp_osd.save.wire import Own, Sent, entries_of

Plans = list[SavePlan]


def _units(use_orig_params: bool) -> list[Unit]:
    names = [f"layers.{n}" for n in range(3)]
    units = [Unit((("embed.weight", (7, 5)), ("norm", (5,))), use_orig_params)]
    for name in names:
        params = ((f"{name}.w", (6, 4)), (f"{name}.e", (2, 3, 4)), (f"{name}.b", (6,)))
        units.append(Unit(params, use_orig_params))
    return units


class Ranks:
    """Simulated ranks, whose plans are pickled as DCP pickles them."""

    def __init__(self, layouts: Sequence[FlatLayout], **options: Any) -> None:
        self.layouts = layouts
        self.planners = [
            FlatOptimSavePlanner.from_layouts({"optim": each}, **options) for each in layouts
        ]
        self.states: list[dict[str, Any]] = [_state(layout) for layout in layouts]

    def local(self) -> Plans:
        plans = []
        for rank, (planner, state) in enumerate(zip(self.planners, self.states, strict=True)):
            planner.set_up_planner({"optim": state, "epoch": 3}, None, rank == 0)
            plans.append(pickle.loads(pickle.dumps(planner.create_local_plan())))
        return plans

    def save(self, change: Callable[[Plans], Plans] = lambda plans: plans) -> Saved:
        plans, metadata = self.planners[0].create_global_plan(change(self.local()))
        answers = [pickle.loads(pickle.dumps(plan)) for plan in plans]
        regular = [isinstance(answer.items, Lazy) for answer in answers]
        assert len(set(regular)) == 1
        seen = [list(plan.items) for plan in plans]  # as a third party's writer would
        items = []
        for planner, answer, before in zip(self.planners, answers, seen, strict=True):
            found = planner.finish_plan(answer).items
            assert _exact(found) == _exact(before)
            for item in found:
                data = planner.resolve_data(item)
                if item.tensor_data is not None:
                    assert data.shape == item.tensor_data.chunk.sizes
            items.append(found)
        return Saved(items, metadata, regular[0])


@dataclasses.dataclass
class Saved:
    items: list[list[WriteItem]]
    metadata: Metadata
    regular: bool


def _exact(items: Sequence[WriteItem]) -> list[Any]:
    """With the hints, which indices leave out of comparisons."""
    return [(item, item.index.index) for item in items]


def _state(layout: FlatLayout) -> dict[str, Any]:
    state: dict[int, Any] = {}
    for number, param in enumerate(layout.params):
        if param.empty:
            continue
        shape = (param.numel,) if param.kind is ParamKind.FLAT else param.shapes[0]
        state[number] = {"step": torch.tensor(3.0), "m": torch.ones(shape), "v": torch.ones(shape)}
    groups = [{"lr": 0.1, "betas": (0.9, 0.99), "params": list(range(len(layout.params)))}]
    return {"state": state, "param_groups": groups}


def _generally(plans: Plans) -> Plans:
    """Somebody has looked through the items: these are theirs, and no interval is known of them."""
    return [dataclasses.replace(plan, items=list(plan.items)) for plan in plans]


def _world(world: int, use_orig_params: bool, sharded: bool = True) -> list[FlatLayout]:
    units = [dataclasses.replace(u, sharded=sharded) for u in _units(use_orig_params)]
    outside = [("outside", (300, 2)), ("small", (3,))]
    return [simulate(units, outside, world_size=world, rank=rank) for rank in range(world)]


def _same(found: Saved, expected: Saved) -> None:
    assert [_exact(a) for a in found.items] == [_exact(b) for b in expected.items]
    assert found.metadata == expected.metadata
    assert list(found.metadata.state_dict_metadata) == list(expected.metadata.state_dict_metadata)
    assert list(found.metadata.planner_data) == list(expected.metadata.planner_data)


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("world", [2, 3, 8, 40])
def test_as_the_general_way(world: int, use_orig_params: bool) -> None:
    layouts = _world(world, use_orig_params)
    found, expected = Ranks(layouts).save(), Ranks(layouts).save(_generally)
    assert found.regular and not expected.regular
    _same(found, expected)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_as_the_general_way_for_any_shapes(data: Any) -> None:
    shape = st.lists(st.integers(0, 5), min_size=1, max_size=4).map(tuple)
    shapes = data.draw(st.lists(shape, min_size=1, max_size=5))
    cut = data.draw(st.integers(0, len(shapes)))
    units = [
        Unit(tuple((f"p{n}", shapes[n]) for n in numbers), data.draw(st.booleans()))
        for numbers in (range(cut), range(cut, len(shapes)))
        if numbers
    ]
    world = data.draw(st.integers(2, 6))
    layouts = [simulate(units, world_size=world, rank=rank) for rank in range(world)]
    found, expected = Ranks(layouts).save(), Ranks(layouts).save(_generally)
    assert found.regular and not expected.regular
    _same(found, expected)


@pytest.mark.parametrize("to_lowest", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
def test_replicas_share_the_writing(sharded: bool, to_lowest: bool) -> None:
    """Two groups that are cut alike (HSDP); or whole tensors (NO_SHARD)."""
    layouts = 2 * _world(4, True, sharded)
    found = Ranks(layouts, dedup_save_to_lowest_rank=to_lowest).save()
    expected = Ranks(layouts, dedup_save_to_lowest_rank=to_lowest).save(_generally)
    assert found.regular and not expected.regular
    indices = [item.index for items in found.items for item in items]
    assert sorted(indices, key=str) == sorted(
        (item.index for items in expected.items for item in items), key=str
    )
    assert list(found.metadata.planner_data) == list(expected.metadata.planner_data)
    for saved in (found, expected):
        for key, stored in saved.metadata.state_dict_metadata.items():
            if isinstance(stored, TensorStorageMetadata):
                mine = [i for items in saved.items for i in items if i.index.fqn == key]
                assert [i.tensor_data.chunk for i in mine if i.tensor_data] == stored.chunks
                assert [i.index.index for i in mine] == list(range(len(mine)))
    for key, stored in found.metadata.state_dict_metadata.items():
        other: Any = expected.metadata.state_dict_metadata[key]
        if isinstance(stored, TensorStorageMetadata):
            assert sorted(stored.chunks, key=str) == sorted(other.chunks, key=str)
    sizes = [[i.tensor_storage_size() or 0 for i in items] for items in found.items]
    loads = [sum(size for size in each if size > 1024) for each in sizes]
    if to_lowest:
        _same(found, expected)
    else:
        assert max(loads) - min(loads) <= 2400  # the largest item


def test_repeated_saves() -> None:
    ranks = Ranks(_world(5, True))
    first = ranks.save()
    for number in range(2):
        for state in ranks.states:
            for each in state["state"].values():
                each["step"] += 1
        assert all(not plan.items for plan in ranks.local())
        again = ranks.save()
        _same(again, first)
        assert again.metadata is not first.metadata, number
    # One rank has less than before; the others send "as before".
    del ranks.states[1]["state"][next(iter(ranks.states[1]["state"]))]
    with pytest.warns(UserWarning, match="zeros are saved"):
        assert not ranks.save().regular


# ---------------------------------------------------------------- what is not regular


def test_values_of_ranks_own() -> None:
    def save(change: Callable[[Plans], Plans] = lambda plans: plans) -> Saved:
        ranks = Ranks(_world(3, False))
        for rank, state in enumerate(ranks.states):
            state["state"][0]["rms"] = torch.tensor(float(rank))
        with pytest.warns(UserWarning, match="not the same on every rank") as told:
            found = ranks.save(change)
        assert len(told) == 1
        return found

    found = save()
    assert not found.regular
    _same(found, save(_generally))


def test_no_state_on_one_rank() -> None:
    def save(change: Callable[[Plans], Plans] = lambda plans: plans) -> Saved:
        ranks = Ranks(_world(3, True))
        ranks.states[1]["state"].popitem()
        first = next(iter(ranks.states[1]["state"]))
        del ranks.states[1]["state"][first]
        with pytest.warns(UserWarning, match="zeros are saved") as told:
            found = ranks.save(change)
        assert len(told) == 1
        return found

    found = save()
    assert not found.regular
    _same(found, save(_generally))


def test_no_state_at_all_is_regular() -> None:
    ranks, other = Ranks(_world(3, True)), Ranks(_world(3, True))
    for state in (*ranks.states, *other.states):
        for number in list(state["state"])[-2:]:
            del state["state"][number]
        state["state"] = {n: s for n, s in state["state"].items() if n < 2}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, expected = ranks.save(), other.save(_generally)
    assert found.regular
    _same(found, expected)


def test_options_that_differ_are_named_with_their_ranks() -> None:
    ranks = Ranks(_world(4, False))
    ranks.states[3]["param_groups"][0]["lr"] = 0.2
    # Ranks of different parts may have options of their own: they are kept per rank.
    with pytest.warns(UserWarning, match="param_groups.0.lr"):
        assert not ranks.save().regular
    layouts = 2 * _world(2, False)
    ranks = Ranks(layouts)
    ranks.states[3]["param_groups"][0]["lr"] = 0.2
    with pytest.raises(LayoutError, match="'lr' differs between ranks 1 and 3"):
        ranks.save()


# ---------------------------------------------------------------- bad plans


def _stock_refuses(plans: Plans) -> bool:
    planner = DefaultSavePlanner()
    try:
        planner.create_global_plan([SavePlan(list(plan.items), planner_data={}) for plan in plans])
    except (ValueError, AssertionError):
        return True
    return False


def _with_interval(layout: FlatLayout, number: int, start: int, stop: int) -> FlatLayout:
    """A layout that is wrong: the rank takes its memory for other elements than it has."""
    param = layout.params[number]
    (segment,) = param.segments
    changed = dataclasses.replace(segment, start=start, stop=stop)
    wrong = dataclasses.replace(param, segments=(changed,), numel=stop - start)
    params = [*layout.params]
    params[number] = wrong
    return dataclasses.replace(layout, params=tuple(params))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_intervals_that_do_not_fit(data: Any) -> None:
    """Moved, longer, shorter, or another rank's, on one rank or two: refused, or of no effect."""
    shape = data.draw(st.sampled_from([(12,), (4, 3), (2, 2, 3)]))
    world = data.draw(st.integers(2, 4))
    unit = Unit((("w", shape), ("b", (8,))))
    layouts = [simulate([unit], world_size=world, rank=rank) for rank in range(world)]
    for _ in range(data.draw(st.integers(1, 2))):
        rank = data.draw(st.integers(0, world - 1))
        start = data.draw(st.integers(0, 11))
        stop = data.draw(st.integers(start + 1, 12))
        layouts[rank] = _with_interval(layouts[rank], 0, start, stop)
    stock = _stock_refuses(Ranks(layouts).local())
    try:
        saved = Ranks(layouts).save()
    except (LayoutError, ValueError):
        return
    # Item by item, what others hold as well is dropped, where stock refuses; never by columns.
    assert not (stock and saved.regular)
    for key, stored in saved.metadata.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata):
            held = torch.zeros(stored.size)
            for chunk in stored.chunks:
                pairs = zip(chunk.offsets, chunk.sizes, strict=True)
                held[tuple(slice(low, low + size) for low, size in pairs)] += 1
            assert (held == 1).all(), key


def _tampered(plan: SavePlan, change: Callable[[array[int]], None]) -> SavePlan:
    """With other intervals, as they travel."""
    sent: Sent = plan.planner_data
    common = sent.read_common()
    own: Own = sent.read_own(common)
    intervals = array("q", own.intervals)
    change(intervals)
    changed = sent.with_own(common, own._replace(intervals=intervals))
    return dataclasses.replace(plan, planner_data=changed)


@pytest.mark.parametrize("by", [(0, 1), (1, 0), (-1, 0), (0, -1), (1000, 1000), (-40, 0)])
def test_intervals_that_were_changed_on_their_way(by: tuple[int, int]) -> None:
    ranks = Ranks(_world(3, True))
    plans = ranks.local()

    def change(intervals: array[int]) -> None:
        intervals[0] += by[0]
        intervals[1] += by[1]

    plans[1] = _tampered(plans[1], change)
    with pytest.raises((LayoutError, ValueError)):
        ranks.planners[0].create_global_plan(plans)


BAD: dict[str, Callable[[WriteItem], list[WriteItem]]] = {
    "lost": lambda item: [],
    "out of bounds": lambda item: [_moved(item, 1000)],
    "before the first": lambda item: [_moved(item, -1)],
    "over another": lambda item: [item, _moved(item, 1)],
    "longer": lambda item: [_longer(item)],
    "of another shape": lambda item: [_of_shape(item)],
}


def _chunk(item: WriteItem, offsets: Sequence[int], sizes: Sequence[int]) -> WriteItem:
    assert item.tensor_data is not None
    chunk = dataclasses.replace(
        item.tensor_data.chunk, offsets=torch.Size(offsets), sizes=torch.Size(sizes)
    )
    index = MetadataIndex(item.index.fqn, torch.Size(offsets))
    data = dataclasses.replace(item.tensor_data, chunk=chunk)
    return dataclasses.replace(item, index=index, tensor_data=data)


def _moved(item: WriteItem, by: int) -> WriteItem:
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    return _chunk(item, [chunk.offsets[0] + by, *chunk.offsets[1:]], chunk.sizes)


def _longer(item: WriteItem) -> WriteItem:
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    return _chunk(item, chunk.offsets, [*chunk.sizes[:-1], chunk.sizes[-1] + 1])


def _of_shape(item: WriteItem) -> WriteItem:
    assert item.tensor_data is not None
    size = torch.Size((item.tensor_data.size[0] + 1, *item.tensor_data.size[1:]))
    return dataclasses.replace(item, tensor_data=dataclasses.replace(item.tensor_data, size=size))


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("ranks_of_it", [(1,), (0, 2)])
@pytest.mark.parametrize("every", [True, False])
def test_boxes_that_do_not_fit(bad: str, ranks_of_it: tuple[int, ...], every: bool) -> None:
    """As a subclass's local plan could have them: refused, as stock refuses them."""

    class Careless(FlatOptimSavePlanner):
        careless = False

        def create_local_plan(self) -> SavePlan:
            plan = super().create_local_plan()
            if not self.careless:
                return plan
            items: list[WriteItem] = []
            done = False
            for item in plan.items:
                touch = item.type == WriteItemType.SHARD and (every or not done)
                items += BAD[bad](item) if touch else [item]
                done = done or touch
            return dataclasses.replace(plan, items=items)

    ranks = Ranks(_world(3, True))
    ranks.planners = [Careless.from_layouts({"optim": each}) for each in ranks.layouts]
    for rank in ranks_of_it:
        planner: Any = ranks.planners[rank]
        planner.careless = True
    stock = _stock_refuses(ranks.local())
    try:
        ranks.save()
        refused = False
    except (LayoutError, ValueError):
        refused = True
    assert refused >= stock
    # Where a shape alone is another one, stock and we go by the first rank's.
    assert refused or bad == "of another shape"


# ---------------------------------------------------------------- what travels


@settings(deadline=None)
@given(st.data())
def test_items_come_out_as_they_went_in(data: Any) -> None:
    """Whatever they are: runs, parts of runs, boxes in any order, with hints or without."""
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple))
    segment = Segment(
        "w", shape, *sorted(data.draw(st.tuples(*[st.integers(0, math.prod(shape))] * 2))), 0
    )
    items: list[WriteItem] = []
    for piece in segment.pieces():
        whole = WriteItem(
            MetadataIndex("w", piece.box.offsets),
            WriteItemType.SHARD,
            tensor_data=_data(shape, piece.box.offsets, piece.box.sizes),
        )
        items.append(whole)
    if items and data.draw(st.booleans()):
        items[-1] = _moved(items[-1], data.draw(st.integers(-2, 2)))
    items = data.draw(st.permutations(items)) if data.draw(st.booleans()) else items
    found = []
    for entry, those, start, stop in entries_of(items):
        found += list(those)
        if not isinstance(entry, WriteItem):
            numel = sum(math.prod(i.tensor_data.chunk.sizes) for i in those if i.tensor_data)
            assert stop - start == numel
    assert found == items


def _data(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> Any:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData

    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    return TensorWriteData(chunk, TensorProperties(torch.float32), torch.Size(shape))


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_the_bytes_of_a_rank_of_a_large_job(use_orig_params: bool) -> None:
    from benchmarks.repeated_saves import Rank, llama

    units = llama(not use_orig_params)
    ranks = [Rank(simulate(units, world_size=256, rank=r), r) for r in (0, 40, 41)]
    sent = [rank.plan(1, number == 0) for number, rank in enumerate(ranks)]
    assert max(map(len, sent)) < 4096
    texts = {pickle.loads(each).planner_data.common for each in sent[1:]}
    assert len(texts) == 1  # ranks of one shape: the same bytes
