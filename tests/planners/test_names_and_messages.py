"""Names that an optimizer or its user gives; messages that are short and name what they mean."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from dcp_fsdp_osd import FlatOptimLoadPlanner, FlatOptimState
from tests.models import Mlp, train_steps, wrap_fsdp1
from tests.planners.checks import assert_same, load, make, save
from tests.ranks import RankError, run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Keyed(torch.optim.AdamW):
    """As TorchRec's ``KeyedOptimizer``: its state dict has names, sorted in each group."""

    def __init__(self, named: dict[str, torch.Tensor], **options: Any) -> None:
        self.names = {id(param): name for name, param in named.items()}
        groups = [{"params": list(named.values())[i::2]} for i in (1, 0)]
        super().__init__(groups, lr=0.01, **options)

    def state_dict(self) -> dict[str, Any]:
        params = [p for group in self.param_groups for p in group["params"]]
        plain = super().state_dict()
        state = {self.names[id(params[i])]: value for i, value in plain["state"].items()}
        groups = [
            {**group, "params": sorted(self.names[id(params[i])] for i in group["params"])}
            for group in plain["param_groups"]
        ]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for mine, group in zip(self.param_groups, state_dict["param_groups"], strict=True):
            assert group["params"] == sorted(self.names[id(p)] for p in mine["params"])
            for param in mine["params"]:
                if self.names[id(param)] in state_dict["state"]:
                    self.state[param] = state_dict["state"][self.names[id(param)]]


def _keyed(rank: int, world: int, path: str) -> None:
    def build() -> tuple[nn.Module, Keyed]:
        model = wrap_fsdp1(Mlp())
        names = [name for name, _ in Mlp().named_parameters()]
        return model, Keyed(dict(zip(names, model.parameters(), strict=True)))

    model, optim = build()
    train_steps(model, optim, 2)
    save(model, optim, path)
    fresh_model, fresh = build()
    loaded = load(fresh_model, fresh, path)
    assert_same(loaded, optim.state_dict())
    fresh.load_state_dict(loaded)
    assert_same(fresh.state_dict(), optim.state_dict())
    fresh_model, fresh = build()
    train_steps(fresh_model, fresh, 1)
    assert_same(load(fresh_model, fresh, path, into=fresh.state_dict()), optim.state_dict())


def test_an_optimizer_that_names_its_parameters(tmp_path: Path) -> None:
    run_ranks(_keyed, 2, str(tmp_path))


class Unready(torch.optim.AdamW):
    """As ``ZeroRedundancyOptimizer``, which has no state dict before it is consolidated."""

    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("not consolidated")


def test_an_optimizer_without_a_state_dict_yet(tmp_path: Path) -> None:
    model = Mlp()
    optim = torch.optim.AdamW(model.parameters())
    train_steps(model, optim, 1)
    save(model, optim, tmp_path)
    assert_same(load(model, Unready(model.parameters()), tmp_path), optim.state_dict())


# ---------------------------------------------------------------- state of the user's own


def test_own_state_of_a_stock_checkpoint(tmp_path: Path) -> None:
    model = Mlp()
    optim = torch.optim.AdamW(model.parameters())
    train_steps(model, optim, 1)
    state = get_optimizer_state_dict(model, optim)
    own = {"seen": 7, "table": torch.arange(6.0).view(2, 3)}
    state["state"]["mine"] = own
    dcp.save({"optim": state}, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    fresh = torch.optim.AdamW(model.parameters())
    with pytest.raises(dcp.api.CheckpointException, match=r"mine: .*state of the user's own"):
        load(model, fresh, tmp_path)
    fresh.state["mine"] = {}  # what the message says
    loaded = load(model, fresh, tmp_path)
    assert_same(loaded["state"].pop("mine"), own)
    assert_same(loaded["state"], optim.state_dict()["state"])
    assert fresh.state["mine"] == {}
    for value in ({}, {"seen": 0, "table": torch.zeros(2, 3)}):
        fresh.state["mine"] = value
        assert_same(load(model, fresh, tmp_path, into=fresh.state_dict())["state"]["mine"], own)


def _all_forms(rank: int, world: int, path: str) -> None:
    """Dicts of the forms for stock's setters, and then the optimizer's own."""
    model, optim = make()
    save(model, optim, path)
    fresh = torch.optim.AdamW(model.parameters())
    for form in ("sharded", "full", "full"):
        load(model, fresh, path, form=form)
    for _ in range(2):
        fresh.load_state_dict(load(model, fresh, path))
        assert_same(fresh.state_dict()["state"], optim.state_dict()["state"])


def test_the_flat_form_after_the_others(tmp_path: Path) -> None:
    run_ranks(_all_forms, 2, str(tmp_path))


# ---------------------------------------------------------------- messages


def _many(rank: int, world: int, path: str, strict: bool) -> list[str]:
    model = wrap_fsdp1(Mlp(depth=9))
    planner = FlatOptimLoadPlanner(model, torch.optim.AdamW(model.parameters()), strict=strict)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dcp.load({"optim": {}}, storage_reader=FileSystemReader(path), planner=planner)
    (text,) = (str(w.message) for w in caught if "skipped (strict" in str(w.message))
    assert len(text.splitlines()) == 12 and "... and 11 more" in text
    return planner.skipped


def _small(rank: int, world: int, path: str) -> None:
    save(*make(), path)


def test_long_lists_are_cut_and_counted(tmp_path: Path) -> None:
    run_ranks(_small, 2, str(tmp_path))
    for skipped in run_ranks(_many, 2, str(tmp_path), False):
        assert len(skipped) == 21 and all("not in the checkpoint" in line for line in skipped)
    with pytest.raises(RankError) as caught:
        run_ranks(_many, 2, str(tmp_path), True)
    for failure in caught.value.failures.values():
        for error in failure.exception.failures.values():  # type: ignore[union-attr]
            text = str(error[0])
            assert text.count("not in the checkpoint") == 10 and "... and 11 more" in text
            assert "planner.skipped then has a line for each" in text


def _alone(rank: int, world: int, path: str) -> None:
    model = wrap_fsdp1(Mlp(depth=15))
    optim = torch.optim.AdamW(model.parameters())
    train_steps(model, optim, 1)
    alone = dist.new_group([0])
    if rank == 0:
        save(model, optim, path, process_group=alone)


def test_long_lists_of_a_save(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"\.\.\. and \d+ more\nCall dcp.save on all") as caught:
        run_ranks(_alone, 2, str(tmp_path))
    (failure,) = caught.value.failures.values()
    assert failure.message.rpartition("found none")[2].count("optim.state.") == 10


def _unpicklable(rank: int, world: int, path: str) -> None:
    model, optim = make()
    optim.param_groups[0]["schedule"] = {"warmup": lambda step: step}
    for stateful in (False, True):
        try:
            if stateful:
                save(model, FlatOptimState(model, optim).optim, path)
            else:
                save(model, optim, path)
        except BaseException as error:
            text = str(error)
        else:
            raise AssertionError("it was saved")
        found = "optim.param_groups.0.schedule.warmup: expected a value that can be pickled"
        assert found in text and "found function" in text


def test_an_option_that_cannot_be_pickled_is_named(tmp_path: Path) -> None:
    run_ranks(_unpicklable, 2, str(tmp_path))
