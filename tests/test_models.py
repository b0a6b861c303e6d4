"""The models that the other tests build on: deterministic, and trainable under FSDP1."""

from __future__ import annotations

import pytest
import torch

from tests.models import (
    MODELS,
    Experts,
    adamw,
    full_state,
    train_steps,
    two_groups,
    wrap_fsdp1,
    wrap_fsdp1_inside,
)
from tests.ranks import run_ranks


def _train(rank: int, world_size: int, name: str, use_orig_params: bool, policy: str) -> dict:
    model = wrap_fsdp1(MODELS[name](), use_orig_params=use_orig_params, policy=policy)
    optim = adamw(model)
    before = torch.get_rng_state()
    losses = train_steps(model, optim, 2)
    assert torch.equal(before, torch.get_rng_state())
    return {"losses": losses, "state": full_state(model, optim)["state"]}


def _shapes(name: str) -> dict[str, torch.Size]:
    return {fqn: value.shape for fqn, value in MODELS[name]().named_parameters()}


@pytest.mark.each_value
@pytest.mark.parametrize("policy", ["root", "blocks", "linears"])
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_models_train_under_fsdp1(name: str, use_orig_params: bool, policy: str) -> None:
    if (
        name.startswith("frozen")
        and not use_orig_params
        and (name, policy)
        != (
            "frozen_block",
            "blocks",
        )
    ):
        pytest.skip("FSDP1 refuses mixed requires_grad in one flat parameter")
    if name == "tied" and policy == "linears":
        pytest.skip("FSDP1 cannot share a parameter between units")
    ranks = run_ranks(_train, 2, name, use_orig_params, policy)
    again = run_ranks(_train, 2, name, use_orig_params, policy)
    shapes = _shapes(name)
    for one, two in zip(ranks, again, strict=True):
        assert one["losses"] == two["losses"]
        assert all(torch.isfinite(torch.tensor(one["losses"])))
        for fqn, state in one["state"].items():
            assert torch.equal(state["exp_avg"], two["state"][fqn]["exp_avg"])
            assert state["exp_avg"].shape == shapes[fqn]
            assert state["exp_avg"].abs().sum() > 0 or shapes[fqn].numel() == 0
    assert ranks[0]["losses"] != ranks[1]["losses"]  # each rank has its own data
    assert len(ranks[0]["state"]) >= 3


def _replicated(rank: int, world_size: int, strategy: str) -> dict:
    model = wrap_fsdp1(MODELS["mlp"](), strategy=strategy)
    optim = adamw(model)
    train_steps(model, optim, 1)
    return full_state(model, optim)["state"]


@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "NO_SHARD"])
def test_other_strategies(strategy: str) -> None:
    want = run_ranks(_train_once, 2)[0]
    for state in run_ranks(_replicated, 2, strategy):
        assert state.keys() == want.keys()
        for fqn in want:
            torch.testing.assert_close(state[fqn]["exp_avg"], want[fqn]["exp_avg"])


def _inside(rank: int, world_size: int) -> dict[str, torch.Size]:
    model = wrap_fsdp1_inside(MODELS["mlp"]())
    optim = adamw(model)
    train_steps(model, optim, 1)
    return {
        name.replace("_fsdp_wrapped_module.", ""): optim.state[parameter]["exp_avg"].shape
        for name, parameter in model.named_parameters()
        if parameter in optim.state  # a rank has no state for a parameter that it holds none of
    }


def test_parameters_outside_fsdp_keep_their_shape() -> None:
    want = _shapes("mlp")
    ranks = run_ranks(_inside, 2)
    assert ranks[0].keys() | ranks[1].keys() == want.keys()
    for shapes in ranks:
        for fqn, shape in shapes.items():
            assert (len(shape) == 1) == (fqn.startswith("blocks.") or fqn.endswith("bias"))
            if not fqn.startswith("blocks."):
                assert shape == want[fqn]


def _train_once(rank: int, world_size: int) -> dict:
    return _replicated(rank, world_size, "FULL_SHARD")


def test_models_are_the_same_wherever_they_are_built() -> None:
    for name, build in MODELS.items():
        torch.manual_seed(len(name))
        before = torch.get_rng_state()
        one = build()
        assert torch.equal(before, torch.get_rng_state())
        torch.rand(3)
        for (fqn, left), right in zip(one.named_parameters(), build().parameters(), strict=True):
            assert torch.equal(left, right), (name, fqn)


def test_groups_cover_each_parameter_once() -> None:
    model = MODELS["transformer"]()
    decay, no_decay = two_groups(model, lr=0.5)
    assert decay["weight_decay"] == 0.1 and no_decay["weight_decay"] == 0.0
    assert decay["lr"] == no_decay["lr"] == 0.5
    parts = {id(p) for p in decay["params"]}, {id(p) for p in no_decay["params"]}
    assert not parts[0] & parts[1] and all(parts)
    assert parts[0] | parts[1] == {id(p) for p in model.parameters()}


def test_unused_experts_get_no_state() -> None:
    model = Experts(use=[1, 3])
    optim = adamw(model)
    train_steps(model, optim, 1)
    with_state = {id(p) for p in optim.state}
    for number, block in enumerate(model.blocks):
        assert all((id(p) in with_state) == (number in (1, 3)) for p in block.parameters())
