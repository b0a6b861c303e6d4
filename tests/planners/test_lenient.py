"""``strict=False`` loads all that can be loaded and tells all that was not.

The oracle is the parameters themselves: their elements are numbers, each another one, and the
checkpoint has the same numbers for state. Where FSDP puts an element, its state must be.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from dcp_fsdp_osd import FlatOptimLoadPlanner, FlatOptimSavePlanner
from tests.models import Mlp, Odd, train_steps, wrap_fsdp1
from tests.planners.checks import assert_same, load, save
from tests.ranks import RankError, run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

NEW = 1e6
"""Numbers from here on are those of elements that no checkpoint has state of."""


class Bigger(Mlp):
    """New parameters in the root's unit and in one block's, and ``last`` has other shapes."""

    def __init__(self, *, reshaped: bool) -> None:
        super().__init__()
        self.extra = nn.Linear(3, 5)
        self.blocks[0].scale = nn.Parameter(torch.ones(3))
        if reshaped:
            self.last = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def number(model: nn.Module) -> None:
    """Give each element of each parameter a number; the same one to those of an ``Mlp``."""
    shapes = {name: tuple(p.shape) for name, p in Mlp().named_parameters()}
    with torch.no_grad():
        for i, (name, param) in enumerate(model.named_parameters()):
            known = shapes.get(name) == tuple(param.shape)
            first = 100.0 * (1 + list(shapes).index(name)) if known else NEW + 100 * i
            param.copy_(torch.arange(param.numel()).view(param.shape) + first)


def give_state(optim: torch.optim.Optimizer, factor: float, step: float) -> None:
    for group in optim.param_groups:
        for param in group["params"]:
            value = param.detach() * factor + 0.0  # padding: no negative zeros
            optim.state[param] = {
                "step": torch.tensor(step),
                "exp_avg": value,
                "exp_avg_sq": value * 2,
            }


def saved(path: str, *, stock: bool, odd_dtype: bool = False) -> None:
    model = Mlp()
    number(model)
    optim = torch.optim.AdamW(model.parameters(), lr=0.5)
    give_state(optim, 1, 7)
    if odd_dtype:
        state = optim.state[model.first.bias]
        state["exp_avg"] = state["exp_avg"].double()
    if stock:
        value = {"optim": get_optimizer_state_dict(model, optim)}
        dcp.save(value, storage_writer=FileSystemWriter(path), no_dist=True)
    else:
        save(model, optim, path)


def _lenient(
    rank: int, world: int, path: str, live: bool, use_orig_params: bool, reshaped: bool
) -> list[str]:
    model = Bigger(reshaped=reshaped)
    number(model)
    model = wrap_fsdp1(model, use_orig_params=use_orig_params)
    optim = torch.optim.AdamW(model.parameters(), lr=0.25)
    if live:
        give_state(optim, -1, 3)
    into = optim.state_dict() if live else {}
    before = copy.deepcopy(into)
    planner = FlatOptimLoadPlanner(model, optim, strict=False)
    state = {"optim": into}
    dcp.load(state, storage_reader=FileSystemReader(path), planner=planner)
    params = list(model.parameters())
    held = False
    for i, param in enumerate(params):
        numbers = param.detach()
        old = numbers < NEW
        if not numbers.numel():
            continue
        if not live and use_orig_params and not old.any():
            assert i not in state["optim"]["state"]
            continue
        held = held or bool(old.any() and (~old).any())
        loaded = state["optim"]["state"][i]
        default = -numbers + 0.0 if live else torch.zeros_like(numbers)
        assert_same(loaded["exp_avg"], torch.where(old, numbers, default))
        assert_same(loaded["exp_avg_sq"], torch.where(old, numbers, default) * 2)
        if old.any() or not use_orig_params:
            assert loaded["step"] == 7
        else:
            assert_same(loaded["step"], before["state"][i]["step"])
    assert use_orig_params or held or rank  # the case that this is about was there
    assert [group["lr"] for group in state["optim"]["param_groups"]] == [0.5]
    return planner.skipped


@pytest.mark.each_value
@pytest.mark.parametrize("stock", [False, True], ids=["ours", "stock"])
@pytest.mark.parametrize("reshaped", [False, True], ids=["new", "reshaped"])
def test_siblings_of_what_is_skipped_are_loaded(
    tmp_path: Path, stock: bool, reshaped: bool
) -> None:
    saved(str(tmp_path), stock=stock)
    for live in (False, True):
        for use_orig_params in (False, True):
            args = (str(tmp_path), live, use_orig_params, reshaped)
            for skipped in run_ranks(_lenient, 2, *args):
                told = {line.partition(": ")[0] for line in skipped}
                expected = {"extra.weight", "extra.bias", "blocks.0.scale"}
                if reshaped:
                    for name in ("weight", "bias"):
                        expected |= {f"last.{name}.exp_avg", f"last.{name}.exp_avg_sq"}
                assert told == expected, (live, use_orig_params, skipped)


def _kept_whole(rank: int, world: int, path: str) -> list[str]:
    model = Mlp()
    number(model)
    model = wrap_fsdp1(model, use_orig_params=False)
    optim = torch.optim.AdamW(model.parameters())
    planner = FlatOptimLoadPlanner(model, optim, strict=False)
    state: dict[str, Any] = {"optim": {}}
    dcp.load(state, storage_reader=FileSystemReader(path), planner=planner)
    for i, param in enumerate(model.parameters()):
        if i == 0:
            assert 0 not in state["optim"]["state"]
        else:
            loaded = state["optim"]["state"][i]
            assert_same(loaded["exp_avg"], param.detach() * (param < NEW))
    return planner.skipped


@pytest.mark.parametrize("stock", [False, True], ids=["ours", "stock"])
def test_all_that_is_skipped_is_named(tmp_path: Path, stock: bool) -> None:
    """State of two dtypes cannot be one flat tensor; every parameter of it is told."""
    saved(str(tmp_path), stock=stock, odd_dtype=True)
    for skipped in run_ranks(_kept_whole, 2, str(tmp_path)):
        text = "\n".join(skipped)
        for name in ("first.weight", "first.bias", "last.weight", "last.bias"):
            assert f"{name}" in text
        assert "blocks" not in text


# ---------------------------------------------------------------- keys of other ranks


class Stages(nn.Module):
    """One rank's pipeline stage, of ``layers`` layers."""

    def __init__(self, rank: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({f"{rank}_{n}": nn.Linear(2, 3) for n in range(layers)})


def _stages(rank: int, layers: int) -> tuple[nn.Module, dict[str, torch.optim.Optimizer]]:
    """An optimizer for each parameter, under the parameter's name."""
    model = Stages(rank, layers)
    number(model)
    optims: dict[str, torch.optim.Optimizer] = {}
    for name, module in model.layers.items():
        optims[f"optim_{name}"] = torch.optim.AdamW(module.parameters())
        give_state(optims[f"optim_{name}"], 1, 7)
    return model, optims


def _save_stages(rank: int, world: int, path: str) -> None:
    model, optims = _stages(rank, 1)
    extra = nn.Linear(2, 2)  # in the optimizer of the last stage
    if rank == world - 1:
        model.layers[f"{rank}_0"].extra = extra
        optims = {f"optim_{rank}_0": torch.optim.AdamW(model.parameters())}
        give_state(optims[f"optim_{rank}_0"], 1, 7)
    planner = FlatOptimSavePlanner(model, optims)
    state = {key: optim.state_dict() for key, optim in optims.items()}
    dcp.save(state, storage_writer=FileSystemWriter(path), planner=planner)


def _load_stages(rank: int, world: int, path: str, strict: bool) -> list[str]:
    model, optims = _stages(rank, 1)
    planner = FlatOptimLoadPlanner(model, optims, strict=strict)
    state: dict[str, Any] = {key: {} for key in optims}
    dcp.load(state, storage_reader=FileSystemReader(path), planner=planner)
    for key, optim in optims.items():
        assert_same(state[key]["state"], optim.state_dict()["state"])
    return planner.skipped


def test_an_extra_parameter_of_an_optimizer_of_other_ranks(tmp_path: Path) -> None:
    run_ranks(_save_stages, 2, str(tmp_path))
    expected = "layers.1_0.extra.weight: in the checkpoint, but the optimizer has no such parameter"
    for skipped in run_ranks(_load_stages, 2, str(tmp_path), False):
        assert expected in skipped and len(skipped) == 2
    with pytest.raises(RankError) as caught:
        run_ranks(_load_stages, 2, str(tmp_path), True)
    assert caught.value.all_raised("CheckpointMismatchError")
    assert expected in str(caught.value)


# ---------------------------------------------------------------- forms for stock's setters


def _form(rank: int, world: int, path: str, form: str) -> list[str]:
    """Siblings of what is skipped are in the dict, what is skipped is not."""
    model = wrap_fsdp1(Bigger(reshaped=True), use_orig_params=False)
    optim = torch.optim.AdamW(model.parameters())
    planner = FlatOptimLoadPlanner(model, optim, strict=False, form=form)
    state: dict[str, Any] = {"optim": {}}
    dcp.load(state, storage_reader=FileSystemReader(path), planner=planner)
    loaded = set(state["optim"]["state"])
    assert loaded == set(dict(Mlp().named_parameters())) - {"last.weight", "last.bias"}
    return planner.skipped


@pytest.mark.parametrize("stock", [False, True], ids=["ours", "stock"])
def test_forms_keep_siblings_too(tmp_path: Path, stock: bool) -> None:
    saved(str(tmp_path), stock=stock)
    for form in ("sharded", "full"):
        for skipped in run_ranks(_form, 2, str(tmp_path), form):
            told = {line.partition(": ")[0] for line in skipped}
            assert {"extra.weight", "extra.bias", "blocks.0.scale"} < told
            assert {"last.weight.exp_avg", "last.bias.exp_avg_sq"} < told


def _strict_form(rank: int, world: int, path: str, form: str) -> None:
    model = wrap_fsdp1(Bigger(reshaped=False))
    optim = torch.optim.AdamW(model.parameters())
    planner = FlatOptimLoadPlanner(model, optim, form=form)
    dcp.load({"optim": {}}, storage_reader=FileSystemReader(path), planner=planner)


@pytest.mark.parametrize("form", ["flat", "sharded", "full"])
def test_what_a_stock_checkpoint_lacks_is_an_error(tmp_path: Path, form: str) -> None:
    saved(str(tmp_path), stock=True)
    with pytest.raises(RankError, match=r"extra\.bias: not in the checkpoint") as caught:
        run_ranks(_strict_form, 2, str(tmp_path), form)
    assert caught.value.all_raised("CheckpointMismatchError")


def _no_rows(rank: int, world: int, path: str, use_orig_params: bool) -> None:
    """A parameter of shape (0, 4), where FSDP has no mesh."""
    model = wrap_fsdp1(Odd(empty=True), use_orig_params=use_orig_params)
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    train_steps(model, optim, 2)
    save(model, optim, path)
    stock = get_optimizer_state_dict(model, optim)["state"]
    fresh = torch.optim.AdamW(model.parameters(), lr=0.01)
    sharded = load(model, fresh, path, form="sharded")["state"]
    assert sharded.keys() == stock.keys() and "empty" in stock
    for fqn, state in stock.items():
        for name in ("exp_avg", "exp_avg_sq"):
            mine, theirs = sharded[fqn][name], state[name]
            assert mine.metadata() == theirs.metadata()
            for left, right in zip(mine.local_shards(), theirs.local_shards(), strict=True):
                assert_same(left.tensor, right.tensor)
    set_optimizer_state_dict(model, fresh, load(model, fresh, path, form="full"))
    assert_same(fresh.state_dict(), optim.state_dict())  # stock's own gather fails on such shards


def test_parameters_without_rows_in_the_sharded_form(tmp_path: Path) -> None:
    for use_orig_params in (True, False):
        run_ranks(_no_rows, 2, str(tmp_path / str(use_orig_params)), use_orig_params)
