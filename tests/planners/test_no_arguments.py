"""Planners without arguments: the Statefuls carry their layouts."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from dcp_fsdp_osd import (
    FlatModelState,
    FlatOptimLoadPlanner,
    FlatOptimSavePlanner,
    FlatOptimState,
    verify_model_state,
    verify_optim_state,
)
from tests.planners.checks import assert_same, load, make, save
from tests.ranks import run_ranks


def _states(*pairs: Any) -> dict[str, Any]:
    state: dict[str, Any] = {"step": 7}
    for number, (model, optim) in enumerate(pairs):
        state[f"net{number}"] = FlatModelState(model)
        state[f"adam{number}"] = FlatOptimState(model, optim)
    return state


def _save(rank: int, world: int, path: str) -> None:
    pairs = make(), make("odd", "momentum", use_orig_params=False)
    planner = FlatOptimSavePlanner()
    dcp.save(_states(*pairs), storage_writer=FileSystemWriter(path), planner=planner)
    # one planner for several saves, of other things
    second = {"optim": FlatOptimState(*pairs[0])}
    dcp.save(second, storage_writer=FileSystemWriter(f"{path}/plain"), planner=planner)
    save(*pairs[0], f"{path}/told")
    told, plain = (FileSystemReader(f"{path}/{n}").read_metadata() for n in ("told", "plain"))
    assert told.state_dict_metadata == plain.state_dict_metadata
    assert told.planner_data == plain.planner_data


def _load(rank: int, world: int, path: str) -> None:
    pairs = (
        make(steps=0, use_orig_params=False),
        make("odd", "momentum", steps=0, policy="root"),
    )
    state = _states(*pairs)
    dcp.load(state, storage_reader=FileSystemReader(path), planner=FlatOptimLoadPlanner())
    assert state["step"] == 7
    for number, (model, optim) in enumerate(pairs):
        assert verify_optim_state(model, optim, path, key=f"adam{number}").ok
        assert verify_model_state(model, path, key=f"net{number}").ok
    model, optim = make(steps=0)
    optim.load_state_dict(load(model, optim, f"{path}/plain"))
    assert verify_optim_state(model, optim, f"{path}/plain").ok


def test_at_another_world_size_and_wrapping(tmp_path: Path) -> None:
    run_ranks(_save, 4, str(tmp_path))
    run_ranks(_load, 2, str(tmp_path))


def test_copies_carry_the_layout_alone() -> None:
    model = nn.Linear(3, 2)
    state = FlatOptimState(model, torch.optim.AdamW(model.parameters())).state_dict()
    for other in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        planner = FlatOptimSavePlanner()
        planner.set_up_planner({"optim": other}, None, True)
        ours = FlatOptimSavePlanner()
        ours.set_up_planner({"optim": state}, None, True)
        assert_same(planner.state_dict, ours.state_dict)
        assert b"Linear" not in pickle.dumps(other)
