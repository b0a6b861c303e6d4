"""Checkpoints that earlier versions of this package wrote load to the bit.

``tests/data/checkpoints_v1`` was written on 2 ranks by the code before per-key kinds, the
optimizer's class and the save's id were recorded.  Beside each lies what stock PyTorch gathered
from the same run (``expected.pt``), or what each rank's ``optim.state_dict()`` was.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

from dcp_fsdp_osd import (
    FlatModelState,
    FlatOptimLoadPlanner,
    FlatOptimSavePlanner,
    FlatOptimState,
    StreamingReader,
    StreamingWriter,
)
from tests.models import Mlp, Odd, train_steps, wrap_fsdp1
from tests.planners.checks import OPTIMIZERS, assert_same
from tests.planners.test_interop import full
from tests.ranks import run_ranks

DATA = Path(__file__).parent.parent / "data" / "checkpoints_v1"
EXTRAS = DATA / "extras_world2"


def _odd(kind: str) -> nn.Module:
    model: nn.Module = Odd()
    if kind == "fsdp2":
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block)
        return fully_shard(model)
    return wrap_fsdp1(model, use_orig_params=kind == "orig") if kind != "plain" else model


def _load(rank: int, world: int, kinds: list[str]) -> None:
    for kind in kinds:
        for saved in ("orig", "flat"):
            path = DATA / f"adamw_{saved}_world2"
            model = _odd(kind)
            optim = OPTIMIZERS["adamw"](model.parameters())
            state: dict[str, Any] = {
                "model": FlatModelState(model),
                "optim": FlatOptimState(model, optim),
                "step": 0,
            }
            planner = FlatOptimLoadPlanner(model, optim)
            dcp.load(state, storage_reader=StreamingReader(path), planner=planner)
            expected = torch.load(path / "expected.pt", weights_only=True)
            assert state["step"] == 7
            whole = StateDictOptions(full_state_dict=True)
            found = get_model_state_dict(model, options=whole)
            assert_same(found, expected["model"])
            assert_same(full(model, optim)["state"], expected["optim"]["state"])


@pytest.mark.parametrize("world", [1, 2, 3])
def test_weights_and_adamw_at_any_layout(world: int) -> None:
    run_ranks(_load, world, ["orig", "flat", "fsdp2"])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_weights_and_adamw_without_a_process_group() -> None:
    _load(0, 1, ["plain"])


class Extras(torch.optim.SGD):
    """Momentum, and nested, per-rank and user-defined state, with int keys at two levels."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for number, param in enumerate(self.param_groups[0]["params"]):
            if param.numel():
                nested = {0: {"sum": torch.full_like(param, number + 0.5)}, 1: {"seen": 3}}
                self.state[param]["nested"] = nested
                self.state[param]["cut"] = torch.arange(2.0 * param.numel() + 6).view(2, -1)
        self.state["own"] = {"ema": torch.arange(5.0), "count": 4, "kind": "x"}  # type: ignore[index]


def _extras(rank: int, world: int, path: str, in_place: bool) -> None:
    model = wrap_fsdp1(Mlp())
    optim = Extras(model.parameters(), lr=0.01, momentum=0.9)
    if in_place:
        train_steps(model, optim, 1)
    state = {"optim": optim.state_dict() if in_place else {}}
    reader, planner = StreamingReader(path), FlatOptimLoadPlanner(model, optim)
    dcp.load(state, storage_reader=reader, planner=planner)
    expected = torch.load(EXTRAS / f"expected_rank{rank}.pt", weights_only=True)
    assert_same(state["optim"]["state"], expected["state"])
    assert_same(state["optim"]["param_groups"], expected["param_groups"])
    assert type(next(k for k in state["optim"]["state"][0]["nested"])) is int


def _extras_again(rank: int, world: int, path: str) -> None:
    """Trained now, they are what was written then."""
    model = wrap_fsdp1(Mlp())
    optim = Extras(model.parameters(), lr=0.01, momentum=0.9)
    train_steps(model, optim, 2)
    planner = FlatOptimSavePlanner(model, optim)
    writer = StreamingWriter(path)
    dcp.save({"optim": optim.state_dict()}, storage_writer=writer, planner=planner)
    _extras(rank, world, path, False)


def test_state_of_every_kind_at_the_layout_of_the_save(tmp_path: Path) -> None:
    run_ranks(_extras, 2, str(EXTRAS), False)
    run_ranks(_extras, 2, str(EXTRAS), True)
    run_ranks(_extras_again, 2, str(tmp_path / "again"))
