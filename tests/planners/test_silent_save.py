"""What a save once lost, changed or made up without a word: refused, told of, or kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from dcp_fsdp_osd import (
    FlatModelState,
    FlatOptimLoadPlanner,
    FlatOptimSavePlanner,
    FlatOptimState,
    verify_model_state,
    verify_optim_state,
)
from tests.models import Mlp, train_steps, wrap_fsdp1
from tests.ranks import run_ranks


def error_of(call: Any, *args: Any, **options: Any) -> str:
    """The text of the error that ``call`` raises here; of a DCP error with all ranks' errors."""
    try:
        call(*args, **options)
    except (Exception, dcp.api.CheckpointException) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


# ---------------------------------------------------------------- parameters of other units


def _unwrapped_root(rank: int, world: int, path: str, use_orig_params: bool) -> list[str]:
    texts = []
    for policy in ("root", "blocks"):
        model = wrap_fsdp1(Mlp(), use_orig_params=use_orig_params, policy=policy)
        optim = torch.optim.AdamW(model.parameters(), lr=0.1)
        train_steps(model, optim, 2)
        inside = model.module
        state = {"model": FlatModelState(inside), "optim": FlatOptimState(inside, optim)}
        calls: list[Any] = [
            lambda inside=inside, optim=optim, state=state: dcp.save(
                state, checkpoint_id=path, planner=FlatOptimSavePlanner(inside, optim)
            ),
            lambda inside=inside, state=state: dcp.save(
                {"model": state["model"]},
                checkpoint_id=path,
                planner=FlatOptimSavePlanner(inside, {}),
            ),
        ]
        good = {"model": FlatModelState(model), "optim": FlatOptimState(model, optim)}
        there = f"{path}/{policy}"
        dcp.save(good, checkpoint_id=there, planner=FlatOptimSavePlanner(model, optim))
        calls += [
            lambda inside=inside, optim=optim, state=state, there=there: dcp.load(
                {"optim": state["optim"]},
                checkpoint_id=there,
                planner=FlatOptimLoadPlanner(inside, optim),
            ),
            lambda inside=inside, state=state, there=there: dcp.load(
                {"model": state["model"]},
                checkpoint_id=there,
                planner=FlatOptimLoadPlanner(inside, {}),
            ),
            lambda inside=inside, optim=optim, there=there: verify_optim_state(
                inside, optim, there
            ),
            lambda inside=inside, there=there: verify_model_state(inside, there),
        ]
        texts += [error_of(call) for call in calls]
    assert not Path(path, ".metadata").exists()
    return texts


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_unwrapped_root_is_refused_on_all_ranks(tmp_path: Path, use_orig_params: bool) -> None:
    for texts in run_ranks(_unwrapped_root, 2, str(tmp_path), use_orig_params):
        assert len(texts) == 12
        for text in texts:
            assert "managed by an FSDP unit outside of the module that was passed" in text
            assert "pass the model that FSDP wrapped" in text


def _one_rank_unwraps(rank: int, world: int, path: str) -> str:
    """The other rank's module is its own (a pipeline stage, say) and whole."""
    model = wrap_fsdp1(Mlp(), policy="root")
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train_steps(model, optim, 2)
    passed = model.module if rank else model
    planner = FlatOptimSavePlanner(passed, optim)
    return error_of(dcp.save, {"optim": optim.state_dict()}, checkpoint_id=path, planner=planner)


def test_what_one_rank_unwraps_is_refused_on_all(tmp_path: Path) -> None:
    for text in run_ranks(_one_rank_unwraps, 2, str(tmp_path)):
        assert "pass the model that FSDP wrapped" in text


def _replaced(rank: int, world: int, path: str) -> list[str]:
    model = wrap_fsdp1(Mlp(), policy="root")
    inner = model.module.first
    inner.weight = nn.Parameter(inner.weight.detach().clone())
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = {"optim": optim.state_dict()}
    first = error_of(
        dcp.save, state, checkpoint_id=path, planner=FlatOptimSavePlanner(model, optim)
    )
    train_steps(model, optim, 2)  # FSDP takes the new one over, on ranks that hold some of it
    return [first]


def test_a_parameter_put_in_the_place_of_a_flattened_one(tmp_path: Path) -> None:
    for (text,) in run_ranks(_replaced, 2, str(tmp_path)):
        assert "first.weight: expected the parameter that FSDP flattened" in text
