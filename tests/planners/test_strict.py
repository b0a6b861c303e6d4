"""Wrong input is one error that lists everything, on every rank, before a tensor is touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, FileSystemWriter

from dcp_fsdp_osd import (
    CheckpointMismatchError,
    FlatOptimLoadPlanner,
    FlatOptimSavePlanner,
    FlatOptimState,
    LayoutError,
)
from tests.models import Mlp, train_steps, wrap_fsdp1
from tests.planners.checks import assert_same, load, make, raw, save
from tests.ranks import RankError, run_ranks


class Other(Mlp):
    """An Mlp with one layer missing, one too many, and one of another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(3, 2, bias=False)
        self.last = nn.Linear(6, 3, bias=False)
        self.blocks[1].up = nn.Linear(6, 12)
        self.blocks[1].down = nn.Linear(12, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.extra(super().forward(x))


def _save(rank: int, world: int, path: str) -> None:
    save(*make(), path)


def _mismatch(rank: int, world: int, path: str, live: bool) -> None:
    model = wrap_fsdp1(Other())
    optim = torch.optim.AdamW(model.parameters())
    into: dict[str, Any] = {}
    if live:
        train_steps(model, optim, 1)
        into = optim.state_dict()
    before = [raw(t) for s in optim.state.values() for t in s.values()]
    try:
        load(model, optim, path, into=into)
    finally:
        assert [raw(t) for s in optim.state.values() for t in s.values()] == before
        assert live or into == {}


@pytest.mark.parametrize("live", [False, True])
def test_all_mismatches_in_one_error(tmp_path: Path, live: bool) -> None:
    run_ranks(_save, 4, str(tmp_path))
    with pytest.raises(RankError) as caught:
        run_ranks(_mismatch, 2, str(tmp_path), live)
    assert caught.value.all_raised("CheckpointMismatchError")
    assert not any("AssertionError" in f.types for f in caught.value.failures.values())
    for line in (
        "extra.weight: not in the checkpoint",
        "last.bias: in the checkpoint, but the optimizer has no such parameter",
        "blocks.1.up.weight.exp_avg: shape (10, 6) in the checkpoint, the parameter has (12, 6)",
        "blocks.1.down.weight.exp_avg_sq: shape (6, 10) in the checkpoint",
        "blocks.1.up.bias.exp_avg: shape (10,)",
    ):
        assert line in str(caught.value)


def _lenient(rank: int, world: int, path: str) -> None:
    model = wrap_fsdp1(Other())
    optim = torch.optim.AdamW(model.parameters())
    train_steps(model, optim, 1)
    names = [n for n, _ in model.named_parameters()]
    live = optim.state_dict()
    before = {
        i: {k: v.clone() for k, v in s.items()} for i, s in optim.state_dict()["state"].items()
    }
    planner = FlatOptimLoadPlanner(model, optim, strict=False)
    state = {"optim": live}
    dcp.load(state, storage_reader=FileSystemReader(path), planner=planner)
    optim.load_state_dict(state["optim"])
    after = optim.state_dict()["state"]
    skipped = [i for i, n in enumerate(names) if "extra" in n or "blocks.1" in n]
    for i in skipped:
        if i in before:
            assert_same(after[i], before[i])
    for i in before.keys() - set(skipped):
        assert float(after[i]["step"]) == 2.0
        assert raw(after[i]["exp_avg"]) != raw(before[i]["exp_avg"])
    text = "\n".join(planner.skipped)
    assert "extra.weight" in text and "blocks.1.up.weight" in text


def test_strict_false_leaves_the_rest_as_it_is(tmp_path: Path) -> None:
    run_ranks(_save, 4, str(tmp_path))
    run_ranks(_lenient, 2, str(tmp_path))


def _live_dtype(rank: int, world: int, path: str) -> None:
    model, optim = make()
    for state in optim.state.values():
        state["exp_avg"] = state["exp_avg"].to(torch.bfloat16)
    load(model, optim, path, into=optim.state_dict())


def test_live_state_of_another_dtype_is_an_error(tmp_path: Path) -> None:
    run_ranks(_save, 2, str(tmp_path))
    with pytest.raises(RankError) as caught:
        run_ranks(_live_dtype, 2, str(tmp_path))
    assert "torch.float32 in the checkpoint, torch.bfloat16 in the optimizer" in str(caught.value)


def _lenient_dtype(rank: int, world: int, path: str) -> None:
    model, optim = make()
    for state in optim.state.values():
        state["exp_avg"] = state["exp_avg"].to(torch.bfloat16)
        state["exp_avg_sq"].zero_()
        state["mine"] = 5
    before = {p: s["exp_avg"].clone() for p, s in optim.state.items()}
    loaded = load(model, optim, path, into=optim.state_dict(), strict=False)
    expected = make()[1].state_dict()["state"]
    for i, (p, exp_avg) in enumerate(before.items()):
        assert_same(optim.state[p]["exp_avg"], exp_avg)
        assert_same(loaded["state"][i]["exp_avg"], exp_avg)
        assert_same(optim.state[p]["exp_avg_sq"], expected[i]["exp_avg_sq"])
        assert loaded["state"][i]["mine"] == 5


def test_strict_false_skips_what_has_another_dtype(tmp_path: Path) -> None:
    run_ranks(_save, 1, str(tmp_path))
    run_ranks(_lenient_dtype, 1, str(tmp_path))


def _wrong_key(rank: int, world: int, path: str) -> None:
    model, optim = make(steps=0)
    state: dict[str, Any] = {"adam": {}}
    planner = FlatOptimLoadPlanner(model, optim, key="adam")
    dcp.load(state, storage_reader=FileSystemReader(path), planner=planner)


def test_nothing_under_the_key(tmp_path: Path) -> None:
    run_ranks(_save, 2, str(tmp_path))
    with pytest.raises(RankError) as caught:
        run_ranks(_wrong_key, 2, str(tmp_path))
    assert caught.value.all_raised("CheckpointMismatchError")
    assert "nothing in the checkpoint under this key" in str(caught.value)


# ---------------------------------------------------------------- a stock planner


def _stock_save(rank: int, world: int, path: str) -> None:
    model, optim = make()
    dcp.save({"optim": FlatOptimState(model, optim)}, storage_writer=FileSystemWriter(path))


def test_stock_save_planner_raises(tmp_path: Path) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(_stock_save, 2, str(tmp_path))
    assert caught.value.all_raised("LayoutError")
    assert "planner=FlatOptimSavePlanner()" in str(caught.value)
    assert not (tmp_path / ".metadata").exists()


def _stock_load(rank: int, world: int, path: str, partial: bool) -> None:
    model, optim = make()
    before = [raw(t) for s in optim.state.values() for t in s.values()]
    try:
        dcp.load(
            {"optim": FlatOptimState(model, optim)},
            storage_reader=FileSystemReader(path),
            planner=DefaultLoadPlanner(allow_partial_load=partial),
        )
    finally:
        assert [raw(t) for s in optim.state.values() for t in s.values()] == before


@pytest.mark.parametrize("partial", [False, True])
def test_stock_load_planner_raises(tmp_path: Path, partial: bool) -> None:
    run_ranks(_save, 2, str(tmp_path))
    with pytest.raises(RankError) as caught:
        run_ranks(_stock_load, 2, str(tmp_path), partial)
    assert "FlatOptimLoadPlanner" in str(caught.value)
    assert not any("AssertionError" in f.types for f in caught.value.failures.values())


# ---------------------------------------------------------------- one process


def test_constructor_errors() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optim = torch.optim.SGD(other.parameters())
    with pytest.raises(LayoutError, match="parameter 0 of group 0"):
        FlatOptimSavePlanner(model, optim)
    optim = torch.optim.SGD(model.parameters())
    with pytest.raises(ValueError, match="enable_plan_caching=False"):
        FlatOptimSavePlanner(model, optim, enable_plan_caching=True)
    with pytest.raises(ValueError, match="form"):
        FlatOptimLoadPlanner(model, optim, form="fat")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_state_dict_of_another_optimizer(tmp_path: Path) -> None:
    model = Mlp()
    optim = torch.optim.AdamW(model.parameters())
    planner = FlatOptimSavePlanner(model, optim)
    for wrong, text in (
        ({}, "expected an optimizer state dict"),
        (torch.optim.AdamW(list(model.parameters())[:2]).state_dict(), "10 parameters, found 2"),
        (None, "found NoneType"),
    ):
        with pytest.raises(dcp.api.CheckpointException) as caught:
            dcp.save({"optim": wrong}, checkpoint_id=tmp_path, planner=planner, no_dist=True)
        assert text in str(caught.value)
    with pytest.raises(CheckpointMismatchError, match="has not seen"):
        FlatOptimState(model, optim).load_state_dict(FlatOptimState(model, optim).state_dict())


def _part_of_the_group(rank: int, world: int, path: str) -> None:
    model, optim = make()
    half = dist.new_group([0, 1])
    if rank < 2:
        save(model, optim, path, process_group=half)


def test_a_save_without_all_ranks_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(_part_of_the_group, 4, str(tmp_path))
    assert set(caught.value.failures) == {0, 1}
    assert "found none that holds" in str(caught.value)
    assert not (tmp_path / ".metadata").exists()


class _Fresh:
    """A Stateful that has no state yet, and takes none without a word."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert not state_dict


@pytest.mark.parametrize("fresh", [False, True])
def test_empty_dicts_that_would_stay_empty(tmp_path: Path, fresh: bool) -> None:
    state = {"sched": {"last_epoch": 3, "lr": [0.1]}, "deep": {"a": {"b": 1}}, "none": {}}
    dcp.save(state, checkpoint_id=tmp_path, planner=FlatOptimSavePlanner())
    empty: Any = _Fresh() if fresh else {}

    def into() -> dict[str, Any]:
        return {"sched": empty, "deep": {"a": {}}, "none": {}, "new": {}}

    says = r"sched: an empty dict, .* has sched.last_epoch, sched.lr$"
    with pytest.raises(dcp.api.CheckpointException, match=rf"(?ms)deep.a: an empty dict.*{says}"):
        dcp.load(into(), checkpoint_id=tmp_path, planner=FlatOptimLoadPlanner())
    planner = FlatOptimLoadPlanner(strict=False)
    with pytest.warns(UserWarning, match=rf"(?ms){says}"):
        dcp.load(into(), checkpoint_id=tmp_path, planner=planner)
    assert [line.partition(":")[0] for line in planner.skipped] == ["deep.a", "sched"]
    filled = {"sched": {"last_epoch": 0, "lr": []}, "none": {}, "new": {}}
    dcp.load(filled, checkpoint_id=tmp_path, planner=FlatOptimLoadPlanner())
    assert filled["sched"] == state["sched"]
