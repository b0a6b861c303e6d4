"""What a save once lost, changed or made up without a word: refused, told of, or kept."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItemType

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
from tests.torch_gaps import lacks


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


# ---------------------------------------------------------------- zeros that nobody asked for


class _Misplanned(FlatOptimSavePlanner):
    """Wants of rank 0 what no rank has."""

    def create_global_plan(self, all_plans: Any) -> Any:
        plans, metadata = super().create_global_plan(all_plans)
        shard = next(i for p in plans for i in p.items if i.type == WriteItemType.SHARD)
        index = MetadataIndex("optim.state.nowhere.exp_avg", shard.index.offset)
        items = [*plans[0].items, dataclasses.replace(shard, index=index)]
        return [dataclasses.replace(plans[0], items=items), *plans[1:]], metadata


def _made_up(rank: int, world: int, path: str) -> list[str]:
    model = wrap_fsdp1(Mlp(), policy="root")
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    train_steps(model, optim, 1)
    texts = [
        error_of(
            dcp.save,
            {"optim": optim.state_dict()},
            checkpoint_id=f"{path}/misplanned",
            planner=_Misplanned(model, optim),
        )
    ]
    meta = torch.ones(3, device="meta")
    osd = optim.state_dict()
    in_state = {k: dict(s) for k, s in osd["state"].items()}
    if rank == 1:  # which the other must not wait for
        first = next(k for k, s in in_state.items() if s["exp_avg"].numel())
        in_state[first]["exp_avg"] = in_state[first]["exp_avg"].to("meta")
    lazy = nn.Linear(2, 2, device="meta")
    for state in (
        {"optim": {**osd, "state": in_state}},
        {"optim": osd, "rest": meta},
        {"optim": osd, "rest": [1, (meta, 2)]},
        {"optim": {**osd, "own": {"ema": meta}}},
        {"optim": osd, "model": FlatModelState(lazy)},
    ):
        planner = FlatOptimSavePlanner(model, optim)
        texts.append(error_of(dcp.save, state, checkpoint_id=f"{path}/meta", planner=planner))
    assert not any(Path(path, name, ".metadata").exists() for name in ("misplanned", "meta"))
    return texts


def test_no_zeros_but_for_marked_holes(tmp_path: Path) -> None:
    names = ["exp_avg", "rest", "rest", "optim.own.ema", "model.weight"]
    for misplanned, *texts in run_ranks(_made_up, 2, str(tmp_path)):
        assert "optim.state.nowhere.exp_avg: expected to write what this rank holds" in misplanned
        for text, name in zip(texts, names, strict=True):
            assert "on the meta device" in text
            assert name in text


# ---------------------------------------------------------------------- safetensors


def _safetensors(rank: int, world: int, path: str) -> list[str]:
    def writer(name: str) -> Any:
        return dcp.HuggingFaceStorageWriter(path=f"{path}/{name}", save_distributed=True)

    model = wrap_fsdp1(nn.Linear(8, 5), policy="root")  # cut within a row
    texts = []
    for name, state in (("pieces", {"model": FlatModelState(model)}), ("objects", {"step": 3})):
        planner = FlatOptimSavePlanner()
        texts.append(error_of(dcp.save, state, storage_writer=writer(name), planner=planner))
    whole = {"a": torch.full((3,), 5.0), "b": torch.arange(4)}  # as torchtitan saves them
    dcp.save(dict(whole), storage_writer=writer("whole"), planner=FlatOptimSavePlanner())
    loaded = {name: torch.zeros_like(value) for name, value in whole.items()}
    reader = dcp.HuggingFaceStorageReader(path=f"{path}/whole")
    dcp.load(loaded, storage_reader=reader, planner=FlatOptimLoadPlanner())
    assert all(torch.equal(loaded[name], value) for name, value in whole.items())
    return texts


@lacks(not hasattr(dcp, "HuggingFaceStorageWriter"), "HuggingFaceStorageWriter")
def test_pieces_and_objects_that_safetensors_would_lose_are_refused(tmp_path: Path) -> None:
    for pieces, objects in run_ranks(_safetensors, 2, str(tmp_path)):
        assert re.search(r"HuggingFaceStorageWriter can keep.*weight: 2 pieces", pieces, re.DOTALL)
        assert "dcp-osd export" in pieces
        assert "step: an object" in objects
