"""Any world size, wrapping and ``use_orig_params`` to any other, judged by stock FSDP's gather."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.models import full_state, train_steps
from tests.planners.checks import assert_same, load, make, save
from tests.ranks import run_ranks


def _save(rank: int, world: int, path: str, kwargs: dict[str, Any]) -> Any:
    model, optim = make(**kwargs)
    save(model, optim, path)
    return full_state(model, optim) if rank == 0 else full_state(model, optim) and None


def _load(rank: int, world: int, path: str, kwargs: dict[str, Any], expected: Any) -> None:
    model, optim = make(**{**kwargs, "steps": 0})
    optim.load_state_dict(load(model, optim, path))
    found = full_state(model, optim)
    if rank == 0:
        assert_same(found["state"], expected["state"])
        options = [{k: v for k, v in g.items() if k != "params"} for g in expected["param_groups"]]
        for group in found["param_groups"]:
            assert_same({k: v for k, v in group.items() if k != "params"}, options[0])
    train_steps(model, optim, 1)  # the state is one that the optimizer can go on with


CASES = [
    # saved with                      # loaded with
    ({"policy": "blocks"}, {"policy": "root"}),
    ({"policy": "root", "use_orig_params": False}, {"policy": "linears"}),
    ({"policy": "linears"}, {"policy": "blocks", "use_orig_params": False}),
    ({"policy": "blocks", "use_orig_params": False}, {"use_orig_params": True}),
    ({"strategy": "NO_SHARD"}, {"strategy": "SHARD_GRAD_OP", "use_orig_params": False}),
    ({"strategy": "FULL_SHARD"}, {"strategy": "NO_SHARD"}),
    ({"policy": "root"}, {"strategy": "NO_SHARD", "use_orig_params": False}),
]


@pytest.mark.each_value
@pytest.mark.parametrize(("saved", "loaded"), CASES)
@pytest.mark.parametrize(("before", "after"), [(4, 2), (1, 3), (3, 4)])
def test_reshard(
    tmp_path: Path, saved: dict[str, Any], loaded: dict[str, Any], before: int, after: int
) -> None:
    expected = run_ranks(_save, before, str(tmp_path), saved)[0]
    run_ranks(_load, after, str(tmp_path), loaded, expected)


@pytest.mark.each_value
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("model", ["odd", "conv", "tied", "transformer", "frozen_block"])
def test_reshard_models(tmp_path: Path, model: str, use_orig_params: bool) -> None:
    kwargs = {"model": model, "policy": "blocks", "use_orig_params": use_orig_params}
    expected = run_ranks(_save, 3, str(tmp_path), kwargs)[0]
    other = {"model": model, "policy": "blocks", "use_orig_params": not use_orig_params}
    run_ranks(_load, 2, str(tmp_path), other, expected)


@pytest.mark.parametrize("optim", ["momentum", "amsgrad", "rmsprop", "nadam"])
def test_reshard_optimizers(tmp_path: Path, optim: str) -> None:
    kwargs = {"optim": optim, "policy": "root"}
    expected = run_ranks(_save, 2, str(tmp_path), kwargs)[0]
    run_ranks(_load, 4, str(tmp_path), {**kwargs, "use_orig_params": False}, expected)
