"""Boxes and layouts, as properties of arbitrary shapes and worlds; no process group."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType

from dcp_fsdp_osd import FlatOptimLoadPlanner, FlatOptimSavePlanner, LayoutError
from dcp_fsdp_osd.fsdp.optim import Target, describe_target
from dcp_fsdp_osd.layout.flat import (
    FlatLayout,
    ParamKind,
    ParamLayout,
    Segment,
    Unit,
    simulate,
    units_of,
)
from dcp_fsdp_osd.layout.geometry import Box, boxes_of_interval, dim_order, narrowed_view
from dcp_fsdp_osd.save.agree import complement, share_out
from tests.models import MODELS, wrap_fsdp1
from tests.ranks import run_ranks

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


def test_the_example_of_the_design() -> None:
    assert boxes_of_interval((4, 3), 4, 11) == [
        Box((1, 1), (1, 2)), Box((2, 0), (1, 3)), Box((3, 0), (1, 2)),
    ]  # fmt: skip


@given(st.data(), SHAPES)
def test_boxes_are_few_contiguous_and_in_order(data: Any, shape: tuple[int, ...]) -> None:
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    whole = torch.arange(numel).view(shape)
    boxes = boxes_of_interval(shape, start, stop)
    assert len(boxes) <= 2 * len(shape) - 1
    found = []
    for box in boxes:
        view = whole[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]
        assert view.numel() == box.numel > 0 and view.is_contiguous()
        found += view.flatten().tolist()
    assert found == list(range(start, stop))


@given(st.data(), SHAPES)
def test_pieces_in_any_memory_order(data: Any, shape: tuple[int, ...]) -> None:
    """A segment of a permuted (channels_last, say) tensor: boxes of the tensor as it is seen."""
    order = tuple(data.draw(st.permutations(range(len(shape)))))
    stored = torch.arange(math.prod(shape)).view([shape[d] for d in order])
    seen = stored.permute([order.index(d) for d in range(len(shape))])
    assert tuple(seen.shape) == shape
    found = dim_order(shape, seen.stride())
    start = data.draw(st.integers(0, seen.numel()))
    stop = data.draw(st.integers(start, seen.numel()))
    pad = data.draw(st.integers(0, 3))
    flat = torch.cat([torch.full((pad,), -1), stored.flatten()[start:stop]])
    for piece in Segment("w", shape, start, stop, pad, found).pieces():
        where = zip(piece.box.offsets, piece.box.sizes, strict=True)
        assert torch.equal(piece.view(flat), seen[tuple(slice(o, o + n) for o, n in where)])


def test_dim_order_refuses_holes() -> None:
    assert dim_order((4, 3), (3, 1)) is None
    assert dim_order((4, 3), (1, 4)) == (1, 0)
    assert dim_order((4, 1, 3), (3, 99, 1)) is None
    with pytest.raises(ValueError, match="do not fill"):
        dim_order((4, 3), (6, 1))
    with pytest.raises(ValueError, match=r"within \[0, 12\)"):
        boxes_of_interval((4, 3), 4, 13)
    assert boxes_of_interval((0, 3), 0, 0) == [Box((0, 0), (0, 3))]


def test_signatures_are_those_in_checkpoints_of_the_first_version() -> None:
    """State that cannot be resharded is found by them, so that they must never change."""
    units = [
        Unit((("a.w", (4, 3)), ("a.b", (5,)))),
        Unit((("c.w", (2, 3)),), use_orig_params=False),
    ]
    found = [simulate(units, [("out", (7,))], world_size=2, rank=rank) for rank in range(2)]
    assert [(each.signature, *(p.signature for p in each.params)) for each in found] == [
        (
            "da776f47c4c4f61d",
            "e887627cd6ffd000",
            "db26d18d04c9577f",
            "f1a4c6d323772564",
            "84eebbed52249571",
        ),
        (
            "88c2d85fc01a746e",
            "8f323670a512bab1",
            "2034907f137bc22c",
            "a663cb51abc693d6",
            "84eebbed52249571",
        ),
    ]
    columns = Box((0, 3), (4, 3))
    segment = Segment("w", (4, 6), 1, 5, 2, (1, 0), columns)
    flat = ParamLayout(("w",), ((4, 6),), ParamKind.FLAT, (segment,), 9, True, problem="any")
    assert flat.signature == "98ddcdee4cf2e601"
    rows = Box((2, 0), (2, 6))
    cut = ParamLayout(("d",), ((4, 6),), ParamKind.DTENSOR, sharded=True, box=rows)
    assert cut.signature == "7c746ba8f78ce602"


@given(st.data(), SHAPES)
def test_overlap(data: Any, shape: tuple[int, ...]) -> None:
    def drawn() -> tuple[Box, set[int]]:
        spans = [sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2))) for n in shape]
        box = Box(tuple(a for a, _ in spans), tuple(b - a for a, b in spans))
        inside = numbers[tuple(slice(a, b) for a, b in spans)]
        return box, set(inside.flatten().tolist())

    numbers = torch.arange(math.prod(shape)).view(shape)
    (one, of_one), (two, of_two) = drawn(), drawn()
    both = one.overlap(two)
    assert (both is None) == (not of_one & of_two)
    if both is not None:
        found = narrowed_view(numbers, both.offsets, both.sizes)
        assert set(found.flatten().tolist()) == of_one & of_two
    moved = Box((0,) * len(shape), one.sizes).shifted(one.offsets)
    assert moved == one and moved.numel == len(of_one)


def test_boxes_of_tensors_of_different_dimensions() -> None:
    boxes = [Box((0,) * dims, (2,) * dims) for dims in (1, 2, 3)]
    for one, two in itertools.permutations(boxes, 2):
        with pytest.raises(ValueError, match=r"shorter|longer"):
            one.overlap(two)
    with pytest.raises(ValueError, match=r"shorter|longer"):
        Box((0, 0), (2, 2)).shifted((1,))
    with pytest.raises(ValueError, match=r"shorter|longer"):
        narrowed_view(torch.zeros(2, 2), (0,), (1, 1))


def test_what_messages_and_users_are_told_of_a_layout() -> None:
    assert Box((0, 3), (4, 3)).numel == 12
    rows = ParamLayout(("d",), ((4, 6),), ParamKind.DTENSOR, sharded=True, box=Box((2, 0), (2, 6)))
    assert rows.describe() == "d at (2, 0) size (2, 6)"
    assert ParamLayout(("a", "b"), ((4,), (5,)), ParamKind.NAMED).describe() == "a, b"
    unit = Unit((("a", (4, 3)), ("b", (5,))), use_orig_params=False)
    first, second, third = (unit.local_params(3, rank)[0] for rank in range(3))
    assert first.describe() == "a[0:6]"
    assert second.describe() == "a[6:12]" and third.describe() == "b[0:5]"
    columns = Segment("w", (4, 6), 1, 5, 0, None, Box((0, 3), (4, 3)))
    part = ParamLayout(("w",), ((4, 6),), ParamKind.FLAT, (columns,), 4, True)
    assert part.describe() == "w[1:5] of the box at (0, 3) size (4, 3)"
    nothing = Unit((("a", (2,)),)).local_params(4, 3)[0]
    assert nothing.describe() == "nothing" and nothing.empty
    layout = simulate([unit], [("out", (7,))], world_size=3, rank=1)
    assert (
        repr(layout) == "<FlatLayout of 2 parameters: 1 flat, 1 whole; 6 of 17 flat elements here>"
    )
    assert repr(simulate([], [], world_size=1, rank=0)) == "<FlatLayout of 0 parameters: none>"


def test_a_unit_that_is_not_sharded_is_whole_on_each_rank() -> None:
    params = (("a", (4, 3)), ("b", (5,)))
    for world, rank, sharded in ((3, 2, False), (1, 0, True)):
        (flat,) = Unit(params, False, sharded).local_params(world, rank)
        assert flat.kind is ParamKind.FLAT and flat.numel == 17 and not flat.sharded
        spans = [(s.fqn, s.start, s.stop, s.offset) for s in flat.segments]
        assert spans == [("a", 0, 12, 0), ("b", 0, 5, 12)]
        whole = Unit(params, True, sharded).local_params(world, rank)
        assert [(p.kind, p.fqns, p.shapes) for p in whole] == [
            (ParamKind.WHOLE, ("a",), ((4, 3),)),
            (ParamKind.WHOLE, ("b",), ((5,),)),
        ]


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)).map(sorted).map(tuple)))
def test_complement(spans: list[tuple[int, int]]) -> None:
    covered = {i for a, b in spans for i in range(a, b)}
    holes = complement(spans, 18, 2)
    assert {i for a, b in holes for i in range(a, b)} == set(range(2, 18)) - covered
    assert all(a < b for a, b in holes)


# ---------------------------------------------------------------- W1 -> W2


@st.composite
def wrappings(draw: Any, shapes: dict[str, tuple[int, ...]]) -> list[FlatLayout]:
    """The layouts of all ranks of a world that wraps these parameters in some way."""
    modules = sorted({name.rsplit(".", 1)[0] for name in shapes})
    wrapped = ["", *draw(st.lists(st.sampled_from(modules), unique=True))]
    ignored = draw(st.lists(st.sampled_from(modules), unique=True, max_size=1))
    units, outside = units_of(
        shapes,
        wrapped,
        ignored=ignored,
        use_orig_params=draw(st.booleans()),
        sharded=draw(st.sampled_from([True, True, False])),
        itemsize=draw(st.sampled_from([2, 4, 8])),
    )
    world = draw(st.integers(1, 7))
    return [simulate(units, outside, world_size=world, rank=r) for r in range(world)]


@st.composite
def cases(draw: Any) -> Any:
    shapes = {
        f"m{i // 2}.p{i}": shape
        for i, shape in enumerate(draw(st.lists(SHAPES, min_size=1, max_size=6)))
    }
    return shapes, draw(wrappings(shapes)), draw(wrappings(shapes))


def _state(layout: FlatLayout, whole: dict[str, torch.Tensor]) -> dict[str, Any]:
    """This rank's flat state, cut from whole tensors element by element (not by boxes)."""
    state = {}
    for i, param in enumerate(layout.params):
        if param.empty:
            continue
        if param.kind is ParamKind.WHOLE:
            value = whole[param.fqns[0]].clone()
        else:
            value = torch.zeros(param.numel)
            for s in param.segments:
                value[s.offset : s.offset + s.numel] = whole[s.fqn].flatten()[s.start : s.stop]
        state[i] = {"exp_avg": value, "exp_avg_sq": value.clone(), "step": torch.tensor(3.0)}
    return state


@settings(max_examples=60, deadline=None)
@given(cases())
def test_every_element_is_written_once_and_read_from_where_it_was_written(case: Any) -> None:
    shapes, before, after = case
    whole, at = {}, 1.0
    for fqn, shape in shapes.items():
        whole[fqn] = torch.arange(at, at + math.prod(shape)).view(shape)
        at += math.prod(shape)

    planners, plans = [], []
    for rank, layout in enumerate(before):
        groups = [{"lr": 0.5, "params": list(range(len(layout.params)))}]
        planner = FlatOptimSavePlanner.from_layouts({"optim": layout})
        state = {"state": _state(layout, whole), "param_groups": groups}
        planner.set_up_planner({"optim": state}, None, rank == 0)
        planners.append(planner)
        plans.append(planner.create_local_plan())
    plans, metadata = planners[0].create_global_plan(plans)
    disk: dict[MetadataIndex, Any] = {}
    writes = {fqn: torch.zeros(shape) for fqn, shape in shapes.items()}
    for planner, plan in zip(planners, plans, strict=True):
        for item in planner.finish_plan(plan).items:
            assert item.index not in disk
            disk[item.index] = data = planner.resolve_data(item)
            if item.index.fqn.endswith("exp_avg"):
                fqn = item.index.fqn.removeprefix("optim.state.").removesuffix(".exp_avg")
                offset = item.index.offset
                where = tuple(slice(o, o + n) for o, n in zip(offset, data.shape, strict=True))
                writes[fqn][where] += 1
    assert all((count == 1).all() for count in writes.values())

    for layout in after:
        params = [torch.nn.Parameter(torch.zeros(p.numel)) for p in layout.params]
        optim = torch.optim.AdamW(params)
        target = Target(layout, tuple(params), tuple(p.device for p in params))
        reader = FlatOptimLoadPlanner.from_targets({"optim": optim}, {"optim": target})
        result: dict[str, Any] = {"optim": {}}
        reader.set_up_planner(result, metadata, True)
        (plan,) = reader.create_global_plan([reader.create_local_plan()])
        for item in reader.finish_plan(plan).items:
            stored = disk[item.storage_index]
            if item.type == LoadItemType.BYTE_IO:
                stored.seek(0)
                reader.load_bytes(item, stored)
                continue
            for d, (o, n) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                stored = stored.narrow(d, o, n)
            destination = reader.resolve_tensor(item)
            destination.copy_(stored)
            reader.commit_tensor(item, destination)
        expected = _state(layout, whole)
        found = result["optim"]["state"]
        assert found.keys() == expected.keys()
        for i, values in expected.items():
            assert torch.equal(found[i]["exp_avg"], values["exp_avg"])
            assert torch.equal(found[i]["step"], values["step"])
        assert result["optim"]["param_groups"][0]["lr"] == 0.5


@pytest.mark.parametrize("to_lowest", [False, True])
def test_replicas_share_the_writing(to_lowest: bool) -> None:
    shapes = {f"p{i}": (64, 16 + i) for i in range(9)}
    units, _ = units_of(shapes, sharded=False)
    layouts = [simulate(units, world_size=4, rank=r) for r in range(4)]
    whole = {fqn: torch.ones(shape) for fqn, shape in shapes.items()}
    plans = []
    for layout in layouts:
        planner = FlatOptimSavePlanner.from_layouts({"optim": layout})
        groups = [{"params": list(range(len(layout.params)))}]
        state = {"state": _state(layout, whole), "param_groups": groups}
        planner.set_up_planner({"optim": state}, None, True)
        plans.append(planner.create_local_plan())
    shared = share_out(plans, to_lowest=to_lowest)
    names = [[item.index.fqn for item in plan.items] for plan in shared]
    assert sorted(n for rank in names for n in rank) == sorted(i.index.fqn for i in plans[0].items)
    assert all("step" not in n for rank in names[1:] for n in rank)  # scalars lie together
    size = [
        sum(i.tensor_data.chunk.sizes.numel() for i in p.items if i.tensor_data) for p in shared
    ]
    if to_lowest:
        assert size[1:] == [0, 0, 0]
    else:
        assert max(size) - min(size) <= 64 * 25


def _stored(layout: FlatLayout, whole: dict[str, torch.Tensor], **options: Any) -> Any:
    """A checkpoint of one rank in memory: metadata, and the items by index."""
    planner = FlatOptimSavePlanner.from_layouts({"optim": layout})
    groups = [{"params": list(range(len(layout.params))), **options}]
    state = {"state": _state(layout, whole), "param_groups": groups}
    planner.set_up_planner({"optim": state}, None, True)
    (plan,), metadata = planner.create_global_plan([planner.create_local_plan()])
    items = planner.finish_plan(plan).items
    return metadata, {item.index: planner.resolve_data(item) for item in items}


@pytest.mark.parametrize("option", ["fused", "capturable", "foreach"])
def test_step_lands_where_the_optimizer_wants_it(option: str) -> None:
    """Fused and capturable optimizers keep ``step`` with the parameter, others on the CPU."""
    units, _ = units_of({"w": (4, 3)})
    layout = simulate(units, world_size=1, rank=0)
    metadata, disk = _stored(layout, {"w": torch.ones(4, 3)}, **{option: True})
    elsewhere = torch.device("meta")
    params = (torch.nn.Parameter(torch.zeros(4, 3, device=elsewhere)),)
    optim = torch.optim.AdamW(params)
    target = Target(layout, params, (elsewhere,))
    reader = FlatOptimLoadPlanner.from_targets({"optim": optim}, {"optim": target})
    result: dict[str, Any] = {"optim": {}}
    reader.set_up_planner(result, metadata, True)
    (plan,) = reader.create_global_plan([reader.create_local_plan()])
    for item in reader.finish_plan(plan).items:
        if item.type == LoadItemType.BYTE_IO:
            disk[item.storage_index].seek(0)
            reader.load_bytes(item, disk[item.storage_index])
        else:
            destination = reader.resolve_tensor(item)
            destination.copy_(disk[item.storage_index])
            reader.commit_tensor(item, destination)
    state = result["optim"]["state"][0]
    assert state["exp_avg"].device == elsewhere
    assert state["step"].device.type == ("cpu" if option == "foreach" else "meta")


# ---------------------------------------------------------------- simulated = live


def _live(rank: int, world: int, name: str, policy: str, use_orig_params: bool) -> FlatLayout:
    model = wrap_fsdp1(MODELS[name](), policy=policy, use_orig_params=use_orig_params)
    optim = torch.optim.SGD(model.parameters(), 0.1)
    return describe_target(model, optim).layout


@pytest.mark.each_value
@pytest.mark.parametrize("world", [1, 3, 4])
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("policy", ["root", "blocks"])
@pytest.mark.parametrize("name", ["mlp", "odd", "conv"])
def test_a_simulated_rank_has_the_layout_of_a_live_one(
    name: str, policy: str, use_orig_params: bool, world: int
) -> None:
    plain = MODELS[name]()
    shapes = {n: tuple(p.shape) for n, p in plain.named_parameters()}
    blocks = [n for n, m in plain.named_modules() if type(m).__name__ == "Block"]
    wrapped = ["", *blocks] if policy == "blocks" else [""]
    units, outside = units_of(shapes, wrapped, use_orig_params=use_orig_params, sharded=world > 1)
    assert not outside
    for rank, live in enumerate(run_ranks(_live, world, name, policy, use_orig_params)):
        simulated = simulate(units, world_size=world, rank=rank)
        assert {p.fqns: p for p in simulated.params} == {p.fqns: p for p in live.params}


def test_layout_errors() -> None:
    units, _ = units_of({"a": (2,)})
    with pytest.raises(LayoutError, match="rank in"):
        simulate(units, world_size=2, rank=2)
    with pytest.raises(LayoutError, match="each parameter once"):
        simulate([*units, *units], world_size=2, rank=0)
