"""How a DTensor lies on a mesh: told as text, made again, cut for each rank.

One process is one rank after the other of a world of four, with torch's process group that moves
nothing: what is tested needs no collective.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from dcp_fsdp_osd.layout.geometry import Box
from dcp_fsdp_osd.layout.placements import (
    Placed,
    dtensor_problem,
    like_param,
    local_box,
    lost_turns,
    placement_text,
    same_but_turns,
    wrong_rows,
)

WORLD = 4
SHAPE = torch.Size((6, 5))
CPU = torch.device("cpu")


@contextlib.contextmanager
def rank(number: int, world: int = WORLD) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=number, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def grid() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def line(name: str | None = None) -> DeviceMesh:
    return init_device_mesh("cpu", (4,), mesh_dim_names=(name,) if name else None)


def dtensor(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size = SHAPE
) -> DTensor:
    return Placed(mesh, placements, shape, CPU).empty(torch.float32)


WAYS: list[tuple[Placement, ...]] = [
    (Replicate(), Replicate()),
    (Replicate(), Shard(0)),
    (Replicate(), Shard(1)),
    (Shard(0), Replicate()),
    (Shard(0), Shard(1)),
    (Shard(1), Shard(0)),
    (Shard(0), Shard(0)),
    (_StridedShard(0, split_factor=2), Shard(0)),
]


@pytest.mark.parametrize("placements", WAYS, ids=str)
@pytest.mark.parametrize("shape", [SHAPE, torch.Size((8, 4))], ids=str)
def test_the_boxes_of_all_ranks(placements: tuple[Placement, ...], shape: torch.Size) -> None:
    """Each rank's box as torch cuts it; together they hold each element as often as copies are."""
    held, refused = torch.zeros(shape), 0
    for number in range(WORLD):
        with rank(number):
            placed = Placed(grid(), placements, shape, CPU)
            box = local_box(placed.mesh, placements, shape)
            value = placed.empty(torch.float64)
            assert value.dtype == torch.float64 and value.device == CPU
            assert value.shape == shape and value.stride() == (shape[1], 1)
            assert value.placements == placements and value.device_mesh == placed.mesh
            assert tuple(value.to_local().shape) == box.sizes
            assert placed.alike(value) and not placed.alike(value.to_local())
            assert not placed.alike(dtensor(placed.mesh, (Shard(1), Shard(1)), shape))
            (chunk,) = placed.chunks()
            assert Box(tuple(chunk.offsets), tuple(chunk.sizes)) == box
            held[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))] += 1
            refused += bool(dtensor_problem("w", value))
    copies = 2 ** sum(isinstance(each, Replicate) for each in placements)
    if refused:  # uneven and strided, which torch 2.6 misplaces
        assert shape == SHAPE and hasattr(placements[0], "split_factor")
    else:
        assert torch.equal(held, torch.full(shape, float(copies)))


@pytest.mark.parametrize("placements", WAYS, ids=str)
def test_what_is_written_is_read_again(placements: tuple[Placement, ...]) -> None:
    with rank(1):
        value = dtensor(grid(), placements)
        text = placement_text(value)
        assert json.loads(text)[0] == ["dp", "tp"]
        read = Placed.read(text, SHAPE, dtensor(grid(), (Shard(0), Shard(0))))
        assert read is not None
        # By their type too: to torch before 2.10 a strided shard equals a plain one.
        assert [(type(p), p) for p in read.placements] == [(type(p), p) for p in placements]
        assert (read.mesh, read.shape, read.device) == (value.device_mesh, SHAPE, CPU)
        assert read.stride is None and read.alike(value)
        whole = Placed.of(value)
        assert (whole.mesh, whole.placements) == (read.mesh, read.placements)
        assert (whole.shape, whole.device, whole.stride) == (SHAPE, CPU, (5, 1))


def test_the_texts_are_those_in_checkpoints() -> None:
    """State is loaded by them from checkpoints of other versions: they must never change."""
    with rank(0):
        assert [json.loads(placement_text(dtensor(grid(), each)))[1:] for each in WAYS] == [
            [["replicate"], ["replicate"]],
            [["replicate"], ["shard", 0]],
            [["replicate"], ["shard", 1]],
            [["shard", 0], ["replicate"]],
            [["shard", 0], ["shard", 1]],
            [["shard", 1], ["shard", 0]],
            [["shard", 0], ["shard", 0]],
            [["strided", 0, 2], ["shard", 0]],
        ]
        assert placement_text(dtensor(line(), (Shard(1),))) == '[[], ["shard", 1]]'
        partial = DTensor.from_local(torch.ones(2), line(), (Partial(),), run_check=False)
        name, code = json.loads(placement_text(partial))
        assert name == [] and code[0] == "other" and len(code) == 2 and "P" in code[1]


def test_on_a_mesh_of_other_dimensions() -> None:
    def read(text: list[Any], param: DTensor) -> Any:
        found = Placed.read(json.dumps(text), SHAPE, param)
        if found is None:
            return None
        assert found.device == CPU and found.shape == SHAPE
        return found.mesh.mesh_dim_names, found.placements

    with rank(2):
        on_line = dtensor(line("dp"), (Shard(1),))
        on_grid = dtensor(grid(), (Replicate(), Shard(1)))
        both_cut = dtensor(grid(), (Shard(0), Shard(1)))
        copied = dtensor(grid(), (Replicate(), Replicate()))
        # A part of the mesh, by its names: as it was.
        assert read([["tp"], ["shard", 0]], both_cut) == (("tp",), (Shard(0),))
        assert read([["dp"], ["replicate"]], both_cut) == (("dp",), (Replicate(),))
        # From two dimensions to one, and back: over the dimension that cuts the parameter.
        names = ("dp", "tp")
        assert read([["a", "b"], ["replicate"], ["shard", 0]], on_line) == (("dp",), (Shard(0),))
        assert read([["a", "b"], ["replicate"], ["replicate"]], on_line)[1] == (Replicate(),)
        assert read([[], ["shard", 0]], on_grid) == (names, (Replicate(), Shard(0)))
        assert read([[], ["replicate"]], on_grid) == (names, (Replicate(), Replicate()))
        assert read([[], ["replicate"]], both_cut) == (names, (Replicate(), Replicate()))
        # Nothing says how: two cuts, or a cut of which no or several dimensions may be meant.
        assert read([["a", "b"], ["shard", 0], ["shard", 1]], on_line) is None
        assert read([[], ["shard", 0]], both_cut) is None
        assert read([[], ["shard", 0]], copied) is None
        assert read([["a", "b"], ["replicate"], ["strided", 0, 2]], on_line) is None
        # What has no rows of its own, and what a later version may write.
        assert read([["dp", "tp"], ["other", "Partial(sum)"], ["replicate"]], on_grid) is None
        assert read([["dp", "tp"], ["replicate"], ["unheard-of", 3]], on_grid) is None


def test_memory_order_and_device() -> None:
    shape = torch.Size((4, 3, 2, 2))
    stride = torch.empty(shape).to(memory_format=torch.channels_last).stride()
    with rank(3):
        placed = Placed(line(), (Shard(0),), shape, CPU, stride)
        value = placed.empty(torch.bfloat16)
        assert value.stride() == stride and value.dtype == torch.bfloat16
        assert Placed.of(value) == placed
        assert placed.empty(None).dtype == torch.get_default_dtype()


def test_a_rank_without_elements() -> None:
    with rank(3):
        short = Placed(line(), (Shard(0),), torch.Size((3, 2)), CPU)
        assert short.chunks() == []
        assert short.empty(torch.float32).to_local().numel() == 0
        outside = Placed(DeviceMesh("cpu", [0, 1]), (Shard(0),), torch.Size((4, 2)), CPU)
        assert outside.chunks() == []
    with rank(1):
        (chunk,) = Placed(DeviceMesh("cpu", [0, 1]), (Shard(0),), torch.Size((4, 2)), CPU).chunks()
        assert tuple(chunk.offsets) == (2, 0) and tuple(chunk.sizes) == (2, 2)


def test_like_a_parameter() -> None:
    plain = torch.ones(3, 5)
    assert like_param(plain, torch.zeros(3, 5)) is plain
    with rank(1):
        param = dtensor(grid(), (Shard(0), Replicate()))
        found = like_param(plain, param)
        assert isinstance(found, DTensor) and Placed.of(param).alike(found)
        assert found.shape == SHAPE and found.stride() == (5, 1) and found.device == CPU
        assert torch.equal(found.to_local(), plain)


def test_a_shard_of_another_size_is_a_problem() -> None:
    with rank(0):
        wrong = DTensor.from_local(
            torch.ones(4, 5), grid(), (Shard(0), Replicate()), run_check=False,
            shape=SHAPE, stride=(5, 1),
        )  # fmt: skip
        text = dtensor_problem("block.w", wrong)
        assert "block.w" in text and "(3, 5)" in text and "(4, 5)" in text and "(6, 5)" in text
        assert "mesh of (2, 2)" in text
        dealt = dtensor(grid(), (Shard(0), Shard(0)))
        assert dtensor_problem("w", dealt) == ""
        strided = dtensor(grid(), (_StridedShard(0, split_factor=3), Replicate()))
        assert "one box" in dtensor_problem("w", strided)
    with rank(3):  # has nothing of it, whatever its shape
        wrong = DTensor.from_local(
            torch.ones(0, 7), line(), (Shard(0),), run_check=False,
            shape=torch.Size((3, 2)), stride=(2, 1),
        )  # fmt: skip
        assert dtensor_problem("w", wrong) == ""


@pytest.mark.parametrize("sizes", [(2, 2), (2, 3), (3, 2), (4, 2)], ids=str)
def test_strided_shards_lie_where_torch_says_or_are_refused(sizes: tuple[int, int]) -> None:
    """FSDP2 over uneven tensor parallelism: before torch 2.8 (2.7 was not tried) some boxes are of
    the right size at a wrong place, and DCP would save rows over those of other ranks."""
    placements = (_StridedShard(0, split_factor=sizes[1]), Shard(0))
    world = sizes[0] * sizes[1]
    for rows in range(1, 14):
        found, refused = torch.zeros(rows, dtype=torch.int64), 0
        for number in range(world):
            with rank(number, world):
                mesh = init_device_mesh("cpu", sizes)
                value = dtensor(mesh, placements, torch.Size((rows, 2)))
                refused += bool(dtensor_problem("w", value))
                box = local_box(mesh, placements, torch.Size((rows, 2)))
                found[box.offsets[0] : box.offsets[0] + box.sizes[0]] += bool(box.numel)
        assert refused or bool((found == 1).all()), rows
        if rows % world == 0:
            assert not refused, rows


def _text(names: list[str], *codes: list[Any]) -> str:
    return json.dumps([names, *codes])


def test_turns_that_arithmetic_lost() -> None:
    turns, plain, whole = ["strided", 0, 2], ["shard", 0], ["replicate"]
    names = ["dp", "tp"]
    param = _text(names, turns, plain)
    assert same_but_turns(_text(names, plain, plain), param)
    for other in (
        _text(names, ["shard", 1], plain),
        _text(names, whole, plain),
        _text(names, plain, whole),
        _text(["dp", "x"], plain, plain),
        _text(names, plain),
        _text(names, plain, plain, plain),
    ):
        assert not same_but_turns(other, param), other
    assert not same_but_turns(param, _text(names, plain, plain))
    assert lost_turns(param, param) == ""
    told = lost_turns(_text(names, plain, plain), param)
    if Shard(0) == _StridedShard(0, split_factor=2):
        assert param in told and torch.__version__ in told and "zeros_like" in told
        assert lost_turns(_text(names, whole, plain), param) == ""
    else:  # this torch knows one from the other, and keeps the turns
        assert told == ""


def test_the_rows_are_named() -> None:
    """FSDP2 over uneven tensor parallelism: which rows, of which dimension, and what helps."""
    placements = (_StridedShard(0, split_factor=2), Shard(0))
    text = wrong_rows("block.w", (3, 2), placements, (13, 7))
    assert text.startswith("block.w: expected FSDP2") and "over a mesh of (3, 2)" in text
    # Tensor parallelism leaves 7 and 6 rows, FSDP2 cuts them into 3, 3, 1 and 2, 2, 2; torch takes
    # the first third for 5 rows, of which the turns give 0-2 and 7-8.
    assert "holds rows [6:7] of dimension 0" in text and "rows [6:7] and [11:12]" in text
    assert "now 13" in text
    assert "holds rows none" in wrong_rows("w", (3, 2), placements, (7, 7))
    dealt = wrong_rows("w", (2,), (_StridedShard(1, split_factor=2),), (3, 8))
    assert "rows [0:2] and [4:6] of dimension 1" in dealt and "one box" in dealt
    assert wrong_rows("w", (3, 2), placements, (12, 7)) == ""
