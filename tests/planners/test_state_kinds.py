"""Everything an optimizer can hold, and what a load must leave alone."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh

from dcp_fsdp_osd import FlatOptimLoadPlanner, FlatOptimSavePlanner, FlatOptimState
from tests.models import Mlp, train_steps, wrap_fsdp1
from tests.planners.checks import OPTIMIZERS, assert_same, load, make, raw, save
from tests.planners.odd_optim import Everything, Owned
from tests.ranks import RankError, run_ranks


def _odd(use_orig_params: bool = True, policy: str = "blocks", **options: Any) -> Any:
    model = wrap_fsdp1(Mlp(), use_orig_params=use_orig_params, policy=policy)
    return model, Everything(model.parameters(), **options)


def _stateful(model: Any, optim: Any, path: str, fresh_model: Any, fresh: Any) -> None:
    """Save and load through FlatOptimState."""
    dcp.save(
        {"optim": FlatOptimState(model, optim)},
        storage_writer=FileSystemWriter(path),
        planner=FlatOptimSavePlanner(model, optim),
    )
    dcp.load(
        {"optim": FlatOptimState(fresh_model, fresh)},
        storage_reader=FileSystemReader(path),
        planner=FlatOptimLoadPlanner(fresh_model, fresh),
    )


def _every_kind(rank: int, world: int, path: str, use_orig_params: bool) -> None:
    model, optim = _odd(use_orig_params)
    train_steps(model, optim, 2)
    optim.state["user"] = {"seen": 7, "table": torch.arange(6.0).view(2, 3)}
    optim.state["lone"] = torch.tensor(3)
    before = optim.state_dict()
    fresh_model, fresh = _odd(use_orig_params)
    _stateful(model, optim, path, fresh_model, fresh)
    assert_same(fresh.state_dict(), before)  # dtypes too, which load_state_dict would cast
    assert_same(load(*_odd(use_orig_params), path), before)


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_every_kind_of_state(tmp_path: Path, use_orig_params: bool) -> None:
    run_ranks(_every_kind, 4, str(tmp_path), use_orig_params)


def _save_blocks(rank: int, world: int, path: str) -> None:
    model, optim = _odd(blocks=True)
    train_steps(model, optim, 2)
    save(model, optim, path)
    fresh_model, fresh = _odd(blocks=True)
    assert_same(load(fresh_model, fresh, path), optim.state_dict())


def _load_blocks(rank: int, world: int, path: str) -> None:
    model, optim = _odd(blocks=True)
    load(model, optim, path)


def test_opaque_state_loads_at_its_own_layout_only(tmp_path: Path) -> None:
    run_ranks(_save_blocks, 4, str(tmp_path))
    with pytest.raises(RankError) as caught:
        run_ranks(_load_blocks, 2, str(tmp_path))
    assert caught.value.all_raised("CheckpointMismatchError")
    for part in ("first.weight", "scales", "saved for first.weight[", "this rank holds"):
        assert part in str(caught.value)


def _owned(rank: int, world: int, **options: Any) -> Any:
    plain = Mlp()
    shapes = [param.shape for param in plain.parameters()]
    model = wrap_fsdp1(plain, **options)
    return model, Owned(model.parameters(), shapes, rank)


def _save_owned(rank: int, world: int, path: str) -> None:
    model, optim = _owned(rank, world)
    train_steps(model, optim, 2)
    save(model, optim, path)
    before = optim.state_dict()
    assert_same(load(*_owned(rank, world), path), before)
    fresh_model, fresh = _owned(rank, world)
    train_steps(fresh_model, fresh, 1)
    assert_same(load(fresh_model, fresh, path, into=fresh.state_dict()), before)


def _load_owned(rank: int, world: int, path: str) -> None:
    load(*_owned(rank, world), path)


@pytest.mark.filterwarnings("ignore")
def test_whole_state_on_one_rank_of_a_cut_parameter(tmp_path: Path) -> None:
    """It comes back whole, to that rank alone, and the others have none: at this layout only."""
    run_ranks(_save_owned, 4, str(tmp_path))
    with pytest.raises(RankError, match="saved per rank and cannot be resharded") as caught:
        run_ranks(_load_owned, 2, str(tmp_path))
    assert caught.value.all_raised("CheckpointMismatchError")


def _replica_of_the_owner(rank: int, world: int, path: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    hybrid = {"strategy": "HYBRID_SHARD", "device_mesh": mesh}
    model, optim = _owned(rank, world, **hybrid)
    train_steps(model, optim, 2)
    save(model, optim, path)
    own: list[Any] = [None] * world
    dist.all_gather_object(own, optim.state_dict())
    expected = own[rank % 2]  # of the first replica, where the owners are
    assert any(each["state"] for each in own[:2])
    assert not any(each["state"] for each in own[2:])
    assert_same(load(*_owned(rank, world, **hybrid), path), expected)


@pytest.mark.filterwarnings("ignore")
def test_a_replica_without_state_does_not_take_it_from_the_one_that_has_it(tmp_path: Path) -> None:
    """Both hold the same elements: what one of them has is what both are given."""
    run_ranks(_replica_of_the_owner, 4, str(tmp_path))


def _whole_on_rank_0(rank: int, world: int, path: str) -> None:
    model, optim = make()
    before = copy.deepcopy(optim.state_dict())
    whole = get_optimizer_state_dict(model, optim, options=StateDictOptions(full_state_dict=True))
    if rank:
        whole["state"] = {}
    planner = FlatOptimSavePlanner(model, optim)
    dcp.save({"optim": whole}, storage_writer=FileSystemWriter(path), planner=planner)
    held = {k: v for k, v in before["state"].items() if v["exp_avg"].numel()}
    assert_same(load(*make(steps=0), path)["state"], held)


def test_whole_state_that_one_rank_alone_has_is_of_all(tmp_path: Path) -> None:
    """Under parameters' names: then it is not that rank's own, and is cut for each."""
    run_ranks(_whole_on_rank_0, 2, str(tmp_path))


def _early_state(rank: int, world: int, path: str) -> None:
    """Ranks without a parameter's elements neither spoil nor lose what the optimizer has there."""
    model, optim = make("odd", "adagrad")
    save(model, optim, path)
    fresh_model, fresh = make("odd", "adagrad", steps=0)
    assert_same(load(fresh_model, fresh, path), optim.state_dict())


def test_state_made_before_the_first_step(tmp_path: Path) -> None:
    run_ranks(_early_state, 4, str(tmp_path))


def _disagree(rank: int, world: int, path: str) -> None:
    model, optim = make(strategy="NO_SHARD")  # ranks that hold the same
    for state in optim.state.values():
        state["step"] += rank == 1
    save(model, optim, path)


def test_scalars_that_differ_between_ranks_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(_disagree, 2, str(tmp_path))
    assert caught.value.all_raised("LayoutError")
    assert "first.weight.step: ranks [0] / [1]" in str(caught.value)


# ---------------------------------------------------------------- no side effects


def _memory(value: Any) -> list[torch.Tensor]:
    if isinstance(value, dict):
        return [t for v in value.values() for t in _memory(v)]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in _memory(v)]
    return [value] if isinstance(value, torch.Tensor) else []


def _snapshot(model: Any, optim: Any, *, state: bool = True) -> list[Any]:
    """RNG, parameters, gradients, groups and (with ``state``) the optimizer's state, as bytes."""
    shot: list[Any] = [raw(torch.get_rng_state())]
    for name, parameter in model.named_parameters():
        grad = None if parameter.grad is None else raw(parameter.grad)
        shot.append((name, raw(parameter), grad))
    shot.append([{k: v for k, v in g.items() if k != "params"} for g in optim.param_groups])
    if state:
        osd = optim.state_dict()["state"]
        shot.append(
            [(k, n, raw(v) if isinstance(v, torch.Tensor) else v)
             for k, s in osd.items() for n, v in s.items()]
        )  # fmt: skip
    return shot


def _no_side_effects(rank: int, world: int, path: str, optim: str, use_orig_params: bool) -> None:
    model, optimizer = make(optim=optim, use_orig_params=use_orig_params)
    output = model(torch.randn(2, 6))
    output.sum().backward()  # leaves gradients
    shot = _snapshot(model, optimizer)
    save(model, optimizer, path)
    assert _snapshot(model, optimizer) == shot
    other = OPTIMIZERS[optim](model.parameters())
    before = _snapshot(model, other)
    loaded = load(model, other, path)
    assert _snapshot(model, other) == before
    live = optimizer.state_dict()
    for values in optimizer.state.values():
        for value in values.values():
            if isinstance(value, torch.Tensor):
                value.zero_()
    shot = _snapshot(model, optimizer, state=False)
    assert load(model, optimizer, path, into=live) is live
    assert _snapshot(model, optimizer, state=False) == shot
    assert_same(optimizer.state_dict()["state"], loaded["state"])  # in place


@pytest.mark.each_value
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("optim", ["adamw", "momentum", "fused", "tensor_lr"])
def test_no_side_effects(tmp_path: Path, optim: str, use_orig_params: bool) -> None:
    run_ranks(_no_side_effects, 4, str(tmp_path), optim, use_orig_params)


def _memory_of_its_own(rank: int, world: int, path: str, use_orig_params: bool) -> None:
    model, optim = make(use_orig_params=use_orig_params)
    save(model, optim, path)
    fresh_model, fresh = make(use_orig_params=use_orig_params, steps=0)
    tensors = _memory(load(fresh_model, fresh, path))
    storages = [t.untyped_storage() for t in tensors]
    assert len({s.data_ptr() for s in storages if s.nbytes()}) == sum(
        bool(s.nbytes()) for s in storages
    )
    assert all(s.nbytes() == t.nbytes for s, t in zip(storages, tensors, strict=True))


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_loaded_tensors_share_no_memory(tmp_path: Path, use_orig_params: bool) -> None:
    run_ranks(_memory_of_its_own, 3, str(tmp_path), use_orig_params)


# ---------------------------------------------------------------- the next step


def _continues(rank: int, world: int, path: str, optim: str, use_orig_params: bool) -> None:
    model, optimizer = make(optim=optim, use_orig_params=use_orig_params)
    save(model, optimizer, path)
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    losses = train_steps(model, optimizer, 3, first=2)
    again, fresh = make(optim=optim, use_orig_params=use_orig_params, steps=0)
    with torch.no_grad():
        for name, parameter in again.named_parameters():
            parameter.copy_(weights[name])
    fresh.load_state_dict(load(again, fresh, path))
    assert train_steps(again, fresh, 3, first=2) == losses
    for (_, left), (_, right) in zip(
        model.named_parameters(), again.named_parameters(), strict=True
    ):
        assert raw(left) == raw(right)


@pytest.mark.each_value
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("optim", ["adamw", "amsgrad", "fused", "momentum", "nadam", "adagrad"])
def test_training_continues_bit_for_bit(tmp_path: Path, optim: str, use_orig_params: bool) -> None:
    run_ranks(_continues, 4, str(tmp_path), optim, use_orig_params)
