"""Where state could be lost or changed without a word: each case here once was."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from dcp_fsdp_osd import (
    FlatModelState,
    FlatOptimLoadPlanner,
    FlatOptimSavePlanner,
    FlatOptimState,
    LayoutError,
    StreamingReader,
    StreamingWriter,
    verify_model_state,
    verify_optim_state,
)
from tests.models import Mlp, train_steps, wrap_fsdp1
from tests.planners.checks import assert_same, load, make, raw, save
from tests.planners.test_interop import compare, full
from tests.ranks import RankError, run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def _one_process(model: nn.Module) -> torch.optim.AdamW:
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optim.step()
    return optim


# ---------------------------------------------------------------- forms


def _named_form(rank: int, world: int, path: str, whole: bool) -> None:
    """A state dict with FQNs for keys of a model with one flat parameter for many FQNs."""
    model, optim = make(use_orig_params=False)
    expected = full(model, optim)
    state = full(model, optim) if whole else get_optimizer_state_dict(model, optim)
    dcp.save(
        {"optim": state},
        storage_writer=FileSystemWriter(path),
        planner=FlatOptimSavePlanner(model, optim),
    )
    other, fresh = make(steps=0)
    fresh.load_state_dict(load(other, fresh, path))
    compare(full(other, fresh), expected)


@pytest.mark.parametrize("whole", [False, True])
def test_fqn_keys_beside_a_flat_parameter(tmp_path: Path, whole: bool) -> None:
    run_ranks(_named_form, 2, str(tmp_path), whole)


def test_two_keys_of_one_parameter_are_an_error(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    optim = _one_process(model)
    optim.state["0.weight"] = {"exp_avg": torch.ones(3)}
    with pytest.raises(dcp.api.CheckpointException, match=r"are both of '0\.weight'"):
        save(model, optim, tmp_path)


def test_a_user_key_that_is_a_parameter_elsewhere(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optim = _one_process(model[0])
    optim.state["1.weight"] = {"exp_avg": torch.full((2, 2), 7.0)}
    planner = FlatOptimSavePlanner(model, optim)
    dcp.save({"optim": optim.state_dict()}, checkpoint_id=tmp_path, planner=planner)
    both = torch.optim.AdamW(model.parameters())
    with pytest.warns(UserWarning, match="1.bias: not in the checkpoint"):
        loaded = load(model, both, tmp_path, strict=False)
    assert set(loaded["state"]) <= {0, 1, 2}
    assert_same(loaded["state"][0], optim.state_dict()["state"][0])
    assert_same(loaded["state"][2]["exp_avg"], torch.full((2, 2), 7.0))


# ---------------------------------------------------------------- everything in the dict


class _Extras(torch.optim.AdamW):
    """An optimizer with state of its own beside ``state`` and ``param_groups``."""

    scale = 1.0
    table: torch.Tensor | None = None

    def state_dict(self) -> dict[str, Any]:
        table = torch.zeros(3) if self.table is None else self.table
        return {**super().state_dict(), "scaler": {"scale": self.scale, "table": table}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scale = state_dict["scaler"]["scale"]
        self.table = state_dict["scaler"]["table"]
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "scaler"})


def test_what_a_subclass_adds_to_its_state_dict(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optim = _Extras(model.parameters())
    optim.scale, optim.table = 512.0, torch.arange(3.0)
    save(model, optim, tmp_path)
    for stateful in (False, True):
        fresh = _Extras(model.parameters())
        if stateful:
            dcp.load(
                {"optim": FlatOptimState(model, fresh)},
                storage_reader=FileSystemReader(tmp_path),
                planner=FlatOptimLoadPlanner(model, fresh),
            )
        else:
            fresh.load_state_dict(load(model, fresh, tmp_path))
        assert fresh.scale == 512.0
        assert_same(fresh.table, torch.arange(3.0))


def test_keys_and_empty_dicts_of_nested_state(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    optim = _one_process(model)
    weight = model[0].weight
    optim.state[weight]["precond"] = {0: torch.ones(2, 2), 10: {1: torch.zeros(2, 2)}}
    optim.state[weight]["nothing"] = {}
    optim.state["user"] = {3: {"a": {}}}
    optim.param_groups[0]["tags"] = {}
    before = optim.state_dict()
    save(model, optim, tmp_path)
    loaded = load(model, torch.optim.AdamW(model.parameters()), tmp_path)
    assert_same(loaded["state"][0], before["state"][0])
    assert loaded["state"]["user"] == {3: {"a": {}}}
    assert loaded["param_groups"][0]["tags"] == {}


@pytest.mark.parametrize("shape", [(3,), (4,), (2, 2), (1, 4)])
def test_odd_state_of_an_unsharded_parameter(tmp_path: Path, shape: tuple[int, ...]) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    optim = _one_process(model)
    optim.state[model[0].weight]["odd"] = torch.arange(float(torch.Size(shape).numel())).view(shape)
    save(model, optim, tmp_path)
    loaded = load(model, torch.optim.AdamW(model.parameters()), tmp_path)
    assert_same(loaded["state"], optim.state_dict()["state"])


def _tuples(rank: int, world: int, path: str, fails: bool) -> None:
    model, optim = make()
    for parameter, state in optim.state.items():
        state["pair"] = (torch.full_like(parameter, rank), [torch.ones_like(parameter)])
    if not fails:
        save(model, optim, path)
        assert_same(load(*make(steps=0), path), optim.state_dict())
    else:
        load(*make(steps=0), path)


def test_tensors_within_tuples_are_per_rank(tmp_path: Path) -> None:
    run_ranks(_tuples, 3, str(tmp_path), False)
    with pytest.raises(RankError, match="pair was saved per rank"):
        run_ranks(_tuples, 2, str(tmp_path), True)


def _user_tensor_differs(rank: int, world: int, path: str) -> None:
    model, optim = make(strategy="NO_SHARD")  # ranks that hold the same
    optim.state["rng"] = {"t": torch.full((2,), float(rank))}
    save(model, optim, path)


def test_user_tensors_that_differ_between_ranks_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"state.rng.t: ranks \[0\] / \[1\]") as caught:
        run_ranks(_user_tensor_differs, 2, str(tmp_path))
    assert caught.value.all_raised("LayoutError")


def _coincidence(rank: int, world: int, path: str) -> None:
    """A tensor of fixed shape that has, on one rank by accident, the local piece's shape."""
    model = wrap_fsdp1(nn.Sequential(nn.Linear(3, 1, bias=False)), policy="root")
    optim = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optim.step()
    for state in optim.state.values():
        state["count"] = torch.ones(1)
    with pytest.warns(UserWarning, match="count") if rank == 0 else contextlib.nullcontext():
        save(model, optim, path)
    assert_same(load(model, optim, path), optim.state_dict())


def test_state_that_is_a_piece_on_one_rank_only(tmp_path: Path) -> None:
    run_ranks(_coincidence, 2, str(tmp_path))


# ---------------------------------------------------------------- memory order, aliasing


def test_channels_last_with_a_fused_optimizer(tmp_path: Path) -> None:
    def build() -> Any:
        torch.manual_seed(0)
        model = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)

    def step(model: nn.Module, optim: torch.optim.Optimizer) -> None:
        data = torch.arange(200.0).view(2, 2, 10, 5).sin()
        model(data).square().sum().backward()
        optim.step()
        optim.zero_grad()

    model, optim = build()
    step(model, optim)
    save(model, optim, tmp_path)
    again, fresh = build()
    again.load_state_dict(model.state_dict())
    fresh.load_state_dict(load(again, fresh, tmp_path))
    step(model, optim)
    step(again, fresh)
    assert [raw(p) for p in again.parameters()] == [raw(p) for p in model.parameters()]


def test_groups_share_no_tensor(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    save(model, torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1)), tmp_path)
    split = [{"params": [p]} for p in model.parameters()]
    optim = torch.optim.AdamW(split, lr=torch.tensor(0.3))
    optim.load_state_dict(load(model, optim, tmp_path))
    optim.param_groups[0]["lr"].fill_(5.0)
    assert_same(optim.param_groups[1]["lr"], torch.tensor(0.1))


def test_named_parameters_are_no_option(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    one = torch.optim.AdamW(model.named_parameters())
    save(model, one, tmp_path)
    named = list(model.named_parameters())
    split = torch.optim.AdamW([{"params": named[:2]}, {"params": named[2:]}])
    split.load_state_dict(load(model, split, tmp_path))
    assert split.param_groups[1]["param_names"] == ["1.weight", "1.bias"]


class _Derived(torch.optim.SGD):
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for values in self.state.values():
            values.setdefault("derived", 1)


def test_what_an_optimizer_adds_when_it_loads_stays(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optim = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optim.step()
    save(model, optim, tmp_path)
    fresh = _Derived(model.parameters(), 0.1, momentum=0.9)
    dcp.load(
        {"optim": FlatOptimState(model, fresh)},
        storage_reader=FileSystemReader(tmp_path),
        planner=FlatOptimLoadPlanner(model, fresh),
    )
    assert all(set(s) == {"momentum_buffer", "derived"} for s in fresh.state.values())


# ---------------------------------------------------------------- errors and reports


def test_strict_false_reports_all_that_it_skips(tmp_path: Path) -> None:
    two = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    save(two, _one_process(two), tmp_path)
    one = nn.Sequential(nn.Linear(2, 2))
    one.add_module("new", nn.Linear(2, 2))
    optim = torch.optim.AdamW(one.parameters())
    planner = FlatOptimLoadPlanner(one, optim, strict=False)
    state: dict[str, Any] = {"optim": {}}
    with pytest.warns(UserWarning, match="skipped"):
        dcp.load(state, storage_reader=FileSystemReader(tmp_path), planner=planner)
    text = "\n".join(planner.skipped)
    for name in ("1.weight: in the checkpoint, but", "new.weight: not in the checkpoint"):
        assert name in text
    assert set(state["optim"]["state"]) == {0, 1}


def test_strict_false_does_not_choose_between_scalars(tmp_path: Path) -> None:
    run_ranks(_two_steps, 1, str(tmp_path))
    with pytest.raises(RankError, match="expected one value") as caught:
        run_ranks(_one_step, 2, str(tmp_path))
    assert caught.value.all_raised("CheckpointMismatchError")


def _two_steps(rank: int, world: int, path: str) -> None:
    model, optim = make()
    for number, state in enumerate(optim.state.values()):
        state["step"] += number
    save(model, optim, path)


def _one_step(rank: int, world: int, path: str) -> None:
    load(*make(steps=0, use_orig_params=False), path, strict=False)


def _stock_lacks(rank: int, world: int, path: str) -> None:
    class More(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.Linear(2, 2)

    model, optim = make()
    state = {"optim": get_optimizer_state_dict(model, optim)}
    dcp.save(state, storage_writer=FileSystemWriter(path))
    other = wrap_fsdp1(More())
    planner = FlatOptimLoadPlanner(other, torch.optim.AdamW(other.parameters()), strict=False)
    with pytest.warns(UserWarning, match="extra.weight: not in the checkpoint"):
        dcp.load({"optim": {}}, storage_reader=FileSystemReader(path), planner=planner)
    assert planner.skipped == [
        "extra.weight: not in the checkpoint",
        "extra.bias: not in the checkpoint",
    ]


def test_what_a_stock_checkpoint_lacks_is_reported(tmp_path: Path) -> None:
    run_ranks(_stock_lacks, 2, str(tmp_path))


def test_two_optimizers_are_filled_together_or_not_at_all(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    groups = [{"params": [p], "lr": 0.1 * i} for i, p in enumerate(model[1].parameters())]
    optims = {"a": torch.optim.AdamW(model[0].parameters()), "b": torch.optim.AdamW(groups)}
    planner = FlatOptimSavePlanner(model, optims)
    state = {k: o.state_dict() for k, o in optims.items()}
    dcp.save(state, checkpoint_id=tmp_path, planner=planner)
    optims["b"] = torch.optim.AdamW(model[1].parameters())
    loaded: dict[str, Any] = {"a": {}, "b": {}}
    with pytest.raises(dcp.api.CheckpointException, match="groups with different options"):
        dcp.load(loaded, checkpoint_id=tmp_path, planner=FlatOptimLoadPlanner(model, optims))
    assert loaded == {"a": {}, "b": {}}


def test_saved_as_one_object(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    optim = torch.optim.AdamW(model.parameters())
    dcp.save({"optim": optim.state_dict()}, checkpoint_id=tmp_path, planner=planner)
    with pytest.raises(dcp.api.CheckpointException, match="saved as one object"):
        load(model, optim, tmp_path)


def test_a_planner_older_than_a_param_group(tmp_path: Path) -> None:
    model, late = nn.Linear(2, 2), nn.Linear(2, 2)
    both = nn.ModuleList([model, late])
    optim = torch.optim.AdamW(model.parameters())
    save(both, optim, tmp_path)
    planner = FlatOptimLoadPlanner(both, optim)
    optim.add_param_group({"params": list(late.parameters())})
    with pytest.raises(dcp.api.CheckpointException, match="make a new planner") as caught:
        dcp.load({"optim": {}}, checkpoint_id=tmp_path, planner=planner)
    assert LayoutError.__name__ in str(caught.value)


def _sets(rank: int, world: int, path: str) -> None:
    """Equal options that look different: sets, and dicts in another order."""
    model, optim = make()
    names = [f"n{i}" for i in range(20)]
    optim.param_groups[0]["tags"] = set(names if rank else names[::-1])
    optim.param_groups[0]["map"] = dict.fromkeys(names if rank else names[::-1], 1)
    train_steps(model, optim, 1)
    save(model, optim, path)


def test_equal_options_that_look_different(tmp_path: Path) -> None:
    run_ranks(_sets, 2, str(tmp_path))


# ---------------------------------------------------------------- default devices


def _default_device(rank: int, world: int, path: str, whole: bool) -> None:
    """What is made without a device within a save or load must not follow the caller's."""
    model, optim = make(use_orig_params=whole)
    state = {"model": FlatModelState(model), "optim": FlatOptimState(model, optim), "step": 7}
    for kind in ("ours", "stock"):
        where = f"{path}/{kind}"
        writer = StreamingWriter(where) if kind == "ours" else FileSystemWriter(where)
        with torch.device("meta"):
            dcp.save(state, storage_writer=writer, planner=FlatOptimSavePlanner())
            assert verify_optim_state(model, optim, where).ok
            assert verify_model_state(model, where).ok
        for broadcast in (True, False):
            other, fresh = make(steps=0, use_orig_params=whole)
            into = {"model": FlatModelState(other), "optim": FlatOptimState(other, fresh)}
            reader = StreamingReader(where) if kind == "ours" else FileSystemReader(where)
            planner = FlatOptimLoadPlanner(broadcast=broadcast)
            torch.set_default_device("meta")
            try:
                dcp.load({**into, "step": 0}, storage_reader=reader, planner=planner)
            finally:
                torch.set_default_device(None)
            assert_same(optim.state_dict(), fresh.state_dict())
            assert_same([*model.parameters()], [*other.parameters()])


@pytest.mark.parametrize("whole", [True, False])
def test_the_callers_default_device(tmp_path: Path, whole: bool) -> None:
    run_ranks(_default_device, 2, str(tmp_path), whole)
