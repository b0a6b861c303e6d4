"""FSDP1 in all its forms: what is loaded is bit for bit what was saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.planners.checks import OPTIMIZERS, assert_same, load, make, save
from tests.ranks import run_ranks


def _round_trip(rank: int, world: int, path: str, kwargs: dict[str, Any]) -> None:
    model, optim = make(**kwargs)
    before = optim.state_dict()
    save(model, optim, path)
    fresh_model, fresh = make(**{**kwargs, "steps": 0})
    loaded = load(fresh_model, fresh, path)
    assert_same(loaded, before)


STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]


@pytest.mark.each_value
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("model", ["mlp", "odd", "conv", "tied", "transformer", "frozen_block"])
def test_models(tmp_path: Path, model: str, use_orig_params: bool) -> None:
    kwargs = {"model": model, "use_orig_params": use_orig_params}
    run_ranks(_round_trip, 4, str(tmp_path), kwargs)


@pytest.mark.each_value
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("policy", ["root", "blocks", "linears"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategies(tmp_path: Path, strategy: str, policy: str, use_orig_params: bool) -> None:
    kwargs = {"policy": policy, "strategy": strategy, "use_orig_params": use_orig_params}
    run_ranks(_round_trip, 4, str(tmp_path), kwargs)


@pytest.mark.each_value
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("optim", list(OPTIMIZERS))
def test_optimizers(tmp_path: Path, optim: str, use_orig_params: bool) -> None:
    kwargs = {"optim": optim, "use_orig_params": use_orig_params}
    run_ranks(_round_trip, 4, str(tmp_path), kwargs)
