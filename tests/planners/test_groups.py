"""Param groups by FQN, frozen parameters, and parameters without gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.models import Experts, FrozenMixed, Mlp, train_steps, two_groups, wrap_fsdp1
from tests.planners.checks import assert_same, load, make, save
from tests.ranks import RankError, run_ranks


def _named(model: nn.Module, *parts: str) -> list[nn.Parameter]:
    return [p for n, p in model.named_parameters() if any(part in n for part in parts)]


def _save_two_groups(rank: int, world: int, path: str) -> None:
    model = wrap_fsdp1(Mlp())
    groups = two_groups(model, lr=0.03)
    groups[1]["name"] = "no decay"  # a custom key, in one group only
    optim = torch.optim.AdamW([*groups, {"params": [], "lr": 0.5}])
    torch.optim.lr_scheduler.StepLR(optim, 1)  # sets initial_lr
    train_steps(model, optim, 1)
    save(model, optim, path)


def _load_reordered(rank: int, world: int, path: str) -> None:
    model = wrap_fsdp1(Mlp(), policy="root")
    decay, rest = two_groups(model)
    decay.pop("weight_decay"), rest.pop("weight_decay")
    half = len(decay["params"]) // 2
    split = [{"params": decay["params"][:half]}, {"params": decay["params"][half:]}]
    optim = torch.optim.AdamW([{"params": []}, rest, *split], lr=9.0)
    loaded = load(model, optim, path)
    empty, no_decay, first, second = loaded["param_groups"]
    assert (empty["params"], empty["lr"]) == ([], 0.5)
    assert (no_decay["weight_decay"], no_decay["name"]) == (0.0, "no decay")
    for group in (first, second):
        assert (group["weight_decay"], group["lr"], group["initial_lr"]) == (0.1, 0.03, 0.03)
        assert "name" not in group
    optim.load_state_dict(loaded)
    assert [len(g["params"]) for g in optim.param_groups] == [
        0, len(rest["params"]), half, len(decay["params"]) - half,
    ]  # fmt: skip


def test_groups_reordered_and_split(tmp_path: Path) -> None:
    run_ranks(_save_two_groups, 2, str(tmp_path))
    run_ranks(_load_reordered, 3, str(tmp_path))


def _load_merged(rank: int, world: int, path: str) -> None:
    model = wrap_fsdp1(Mlp())
    optim = torch.optim.AdamW(model.parameters())
    load(model, optim, path)


def test_merging_groups_that_differ_is_an_error_that_lists_the_options(tmp_path: Path) -> None:
    run_ranks(_save_two_groups, 2, str(tmp_path))
    with pytest.raises(RankError) as caught:
        run_ranks(_load_merged, 2, str(tmp_path))
    assert caught.value.all_raised("CheckpointMismatchError")
    for part in ("weight_decay", "0.1", "'no decay'", "first.weight", "first.bias"):
        assert part in str(caught.value)
    assert "initial_lr" not in str(caught.value).split("found that groups")[1].split("Keep")[0]


def _save_equal_groups(rank: int, world: int, path: str) -> None:
    model = wrap_fsdp1(Mlp())
    optim = torch.optim.AdamW(
        [{"params": _named(model, "weight")}, {"params": _named(model, "bias")}], lr=0.2
    )
    train_steps(model, optim, 1)
    save(model, optim, path)


def _load_equal_merged(rank: int, world: int, path: str) -> None:
    model = wrap_fsdp1(Mlp())
    optim = torch.optim.AdamW(model.parameters())
    (group,) = load(model, optim, path)["param_groups"]
    assert group["lr"] == 0.2


def test_groups_with_equal_options_merge(tmp_path: Path) -> None:
    run_ranks(_save_equal_groups, 2, str(tmp_path))
    run_ranks(_load_equal_merged, 2, str(tmp_path))


def _other_order(rank: int, world: int, path: str) -> None:
    """Ranks that list their groups, and the parameters in them, in different orders."""
    model = wrap_fsdp1(Mlp())
    groups = two_groups(model)
    if rank % 2:
        groups = [{**g, "params": g["params"][::-1]} for g in groups[::-1]]
    optim = torch.optim.AdamW(groups)
    train_steps(model, optim, 2)
    before = optim.state_dict()
    save(model, optim, path)
    assert_same(load(model, optim, path), before)


def test_ranks_with_different_parameter_order(tmp_path: Path) -> None:
    run_ranks(_other_order, 4, str(tmp_path))


def _options_differ(rank: int, world: int, path: str) -> None:
    model = wrap_fsdp1(Mlp(), strategy="NO_SHARD")  # ranks that hold the same
    optim = torch.optim.AdamW(model.parameters(), lr=0.1 if rank != 2 else 0.2)
    train_steps(model, optim, 1)
    save(model, optim, path)


def test_options_that_differ_between_ranks_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(_options_differ, 4, str(tmp_path))
    assert caught.value.all_raised("LayoutError")
    assert "option 'lr' differs between ranks 0 and 2" in str(caught.value)


# ---------------------------------------------------------------- frozen, no gradient


def _frozen(rank: int, world: int, path: str, use_orig_params: bool) -> None:
    kwargs = {"model": "frozen_mixed" if use_orig_params else "frozen_block"}
    model, optim = make(**kwargs, use_orig_params=use_orig_params)
    before = optim.state_dict()
    assert len(before["state"]) < len(optim.param_groups[0]["params"])
    save(model, optim, path)
    fresh_model, fresh = make(**kwargs, steps=0, use_orig_params=use_orig_params)
    assert_same(load(fresh_model, fresh, path), before)
    for parameter in fresh_model.parameters():  # unfrozen after the save
        parameter.requires_grad_(True)
    assert_same(load(fresh_model, fresh, path), before)


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_frozen(tmp_path: Path, use_orig_params: bool) -> None:
    run_ranks(_frozen, 3, str(tmp_path), use_orig_params)


def _trained_then_frozen(rank: int, world: int, path: str) -> None:
    model, optim = make()
    frozen = _named(model, "blocks.0")
    for parameter in frozen:
        parameter.requires_grad_(False)
    train_steps(model, optim, 1)
    before = optim.state_dict()
    save(model, optim, path)
    fresh_model, fresh = make(steps=0)
    assert_same(load(fresh_model, fresh, path), before)
    steps = {float(s["step"]) for s in before["state"].values()}
    assert steps <= {2.0, 3.0} and 3.0 in steps


def test_trained_then_frozen(tmp_path: Path) -> None:
    run_ranks(_trained_then_frozen, 3, str(tmp_path))


def _unfrozen_into_flat(rank: int, world: int, path: str) -> dict[str, Any]:
    """FQNs with state beside FQNs without, which one flat parameter cannot tell apart."""
    model = wrap_fsdp1(Mlp(), policy="root", use_orig_params=False)
    optim = torch.optim.AdamW(model.parameters())
    with pytest.warns(UserWarning, match=r"blocks.0.up.bias.*becomes zeros"):
        loaded = load(model, optim, path)
    optim.load_state_dict(loaded)
    for value in (optim.state_dict()["state"][0][n] for n in ("exp_avg", "exp_avg_sq")):
        value[: 162 - rank].fill_(7.0)  # all but the padding at the end of rank 1
    with pytest.warns(UserWarning, match="becomes zeros"):
        in_place = load(model, optim, path, into=optim.state_dict())
    again = load(model, optim, path)
    assert_same(in_place["state"], again["state"])
    return again["state"][0]


def _save_frozen_mixed(rank: int, world: int, path: str) -> None:
    model = wrap_fsdp1(FrozenMixed())
    optim = torch.optim.AdamW(model.parameters())
    train_steps(model, optim, 2)
    save(model, optim, path)


def test_fqns_without_state_become_zeros_in_a_flat_parameter(tmp_path: Path) -> None:
    run_ranks(_save_frozen_mixed, 2, str(tmp_path))
    states = run_ranks(_unfrozen_into_flat, 2, str(tmp_path))
    flat = torch.cat([s["exp_avg"] for s in states])
    # Flattened from the root: blocks.0.up.weight 10x6, blocks.0.up.bias 10, ...
    sizes = [6 * 6, 6, 10 * 6, 10, 6 * 10, 10 * 6, 10, 6 * 10, 3 * 6, 3]
    parts = flat[: sum(sizes)].split(sizes)
    assert [bool(p.any()) for p in parts] == [
        False, True, True, False, True, True, True, False, True, True,
    ]  # fmt: skip
    assert float(states[0]["step"]) == 2.0


def _scalars_differ(rank: int, world: int, path: str) -> None:
    model, optim = make()
    for parameter in _named(model, "blocks.0"):
        parameter.requires_grad_(False)
    train_steps(model, optim, 1)
    save(model, optim, path)


def _load_flat(rank: int, world: int, path: str) -> None:
    model = wrap_fsdp1(Mlp(), policy="root", use_orig_params=False)
    optim = torch.optim.AdamW(model.parameters())
    load(model, optim, path)


def test_scalars_that_differ_in_one_flat_parameter_are_an_error(tmp_path: Path) -> None:
    run_ranks(_scalars_differ, 2, str(tmp_path))
    with pytest.raises(RankError) as caught:
        run_ranks(_load_flat, 2, str(tmp_path))
    assert caught.value.all_raised("CheckpointMismatchError")
    assert "blocks.0.up.weight: 2.0" in str(caught.value)
    assert "first.weight: 3.0" in str(caught.value)


def _experts(rank: int, world: int, path: str, use: list[int] | None) -> None:
    model = wrap_fsdp1(Experts(use=use), policy="root")
    optim = torch.optim.AdamW(model.parameters())
    train_steps(model, optim, 2)
    before = optim.state_dict()
    save(model, optim, path)
    other_model = wrap_fsdp1(Experts(use=use), policy="root")
    other = torch.optim.AdamW(other_model.parameters())
    assert_same(load(other_model, other, path), before)


@pytest.mark.parametrize("use", [[0, 1], None])
def test_no_gradient_on_all_ranks_or_on_some(tmp_path: Path, use: list[int] | None) -> None:
    run_ranks(_experts, 4, str(tmp_path), use)


def _experts_resharded(rank: int, world: int, path: str) -> None:
    model = wrap_fsdp1(Experts(use=[0, 1, 2, 3]))
    optim = torch.optim.AdamW(model.parameters())
    optim.load_state_dict(load(model, optim, path))
    train_steps(model, optim, 1)


def test_gradients_on_some_ranks_load_elsewhere(tmp_path: Path) -> None:
    run_ranks(_experts, 4, str(tmp_path), None)
    run_ranks(_experts_resharded, 2, str(tmp_path))
