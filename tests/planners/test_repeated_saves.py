"""One planner for many saves: plans are sent once, and what changes is noticed."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from dcp_fsdp_osd import (
    FlatModelState,
    FlatOptimLoadPlanner,
    FlatOptimSavePlanner,
    FlatOptimState,
    StreamingReader,
    StreamingWriter,
)
from tests.models import Mlp, adamw, train_steps, two_groups, wrap_fsdp1
from tests.planners.checks import assert_same
from tests.ranks import run_ranks
from tests.torch_gaps import needs_groups_without_rank_0


class Recorder(StreamingWriter):
    """Notes the items and the size of the plans that this rank sent; fails on demand."""

    sent: int
    bytes_sent: int
    fails_at = ""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if self.fails_at == "plan":
            raise OSError("no plan")
        self.sent = len(plan.items)
        self.bytes_sent = len(pickle.dumps(plan))
        return super().prepare_local_plan(plan)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        if self.fails_at == "write":
            raise OSError("no space")
        return super().write_data(plan, planner)


def _make(flat: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = wrap_fsdp1(Mlp(), policy="blocks", use_orig_params=not flat)
    params: Any = model.parameters() if flat else two_groups(model)
    return model, torch.optim.AdamW(params, lr=0.01)


class Run:
    """A training that is saved again and again by one planner, and what was when it was saved."""

    def __init__(self, rank: int, folder: str, *, flat: bool = False) -> None:
        self.rank, self.folder, self.flat = rank, folder, flat
        self.model, self.optim = _make(flat)
        self.planner = FlatOptimSavePlanner()
        self.saved: dict[str, Any] = {}
        self.step = 0

    def train(self) -> None:
        train_steps(self.model, self.optim, 1, first=self.step)
        self.step += 1
        for group in self.optim.param_groups:
            group["lr"] *= 0.9

    def state(self) -> dict[str, Any]:
        optim = FlatOptimState(self.model, self.optim)
        return {"model": FlatModelState(self.model), "optim": optim, "step": self.step}

    def save(self, name: str, *, group: Any = None, fails_at: str = "", **more: Any) -> Recorder:
        writer = Recorder(f"{self.folder}/{name}", fsync=False)
        writer.fails_at = fails_at
        dcp.save(
            {**self.state(), **more},
            storage_writer=writer,
            planner=self.planner,
            process_group=group,
        )
        weights = [param.detach() for param in self.model.parameters()]
        self.saved[name] = copy.deepcopy((self.optim.state_dict(), weights, self.step))
        return writer

    def check(self) -> None:
        for name, (optim_state, weights, step) in self.saved.items():
            model, optim = _make(self.flat)
            train_steps(model, optim, 1, seed=9)
            state = {
                "model": FlatModelState(model),
                "optim": FlatOptimState(model, optim),
                "step": 0,
            }
            reader = StreamingReader(f"{self.folder}/{name}")
            dcp.load(state, storage_reader=reader, planner=FlatOptimLoadPlanner())
            found = optim.state_dict()
            for each in (*found["state"].values(), *optim_state["state"].values()):
                each.pop("own", None)  # a scalar that one rank had, and all of the FQN's get
            assert_same(found, optim_state)
            assert_same([param.detach() for param in model.parameters()], weights)
            assert state["step"] == step


def _unchanged(rank: int, world: int, folder: str) -> None:
    for flat in (False, True):
        run = Run(rank, f"{folder}/{flat}", flat=flat)
        run.train()
        first = run.save("0")
        for number in range(1, 4):
            run.train()
            again = run.save(str(number))
            assert again.sent == 0 < first.sent
            assert again.bytes_sent < first.bytes_sent / 4
        run.check()


def test_an_unchanged_layout_is_sent_once(tmp_path: Path) -> None:
    """Though values, learning rates and the step have changed."""
    run_ranks(_unchanged, 3, str(tmp_path))


def _changed(rank: int, world: int, folder: str) -> None:
    run = Run(rank, folder)
    run.train()
    run.save("first")
    # State that one rank alone has: the others send "as before".
    mine = next(p for p in run.model.parameters() if p.numel())
    if rank == 1:
        run.optim.state[mine]["own"] = torch.tensor(4.0)
    assert (run.save("one rank has more").sent == 0) == (rank != 1)
    assert run.save("still").sent == 0
    run.optim.state[mine].pop("own", None)
    assert (run.save("as at first").sent == 0) == (rank != 1)
    # A value more, of all; then one less.
    assert run.save("more", epoch=3).sent > 0
    assert run.save("less").sent > 0
    # A group's option that is new.
    for group in run.optim.param_groups:
        group["note"] = "x"
    assert run.save("option").sent > 0
    assert run.save("option again").sent == 0
    run.check()


def test_what_changes_is_planned_anew(tmp_path: Path) -> None:
    run_ranks(_changed, 3, str(tmp_path))


def _values(rank: int, world: int, folder: str) -> None:
    """Values that were equal and are not any more, with the names that they had."""
    run = Run(rank, folder)
    run.train()
    run.save("first", seed=1)
    assert run.save("second", seed=2).sent == 0
    for repeated in range(2):
        with pytest.raises(CheckpointException, match="seed differ"):
            run.save(f"differs {repeated}", seed=rank)
    run.saved = {k: v for k, v in run.saved.items() if not k.startswith("differs")}
    assert run.save("equal again", seed=3).sent > 0
    # Scalars that become different are kept per rank, and one again when they are equal.
    state = [each for each in run.optim.state.values() if "step" in each]
    for each in state:
        each["rms"] = torch.tensor(1.0)
    run.save("rms", seed=3)
    for number, each in enumerate(state):
        each["rms"] = torch.tensor(float(10 * rank + number))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert run.save("rms differs", seed=3).sent == 0
    assert any("not the same on every rank" in str(each.message) for each in told) == (rank == 0)
    for each in state:
        each["rms"] = torch.tensor(2.0)
    assert run.save("rms is one again", seed=3).sent == 0
    run.check()


def test_values_are_compared_in_each_save(tmp_path: Path) -> None:
    run_ranks(_values, 2, str(tmp_path))


def _failures(rank: int, world: int, folder: str) -> None:
    run = Run(rank, folder)
    run.train()
    run.save("first")
    for number, place in enumerate(("write", "plan", "plan", "write")):
        fails = place if rank == number % 2 else ""
        with pytest.raises(CheckpointException):
            run.save(f"fails {number}", fails_at=fails)
        sent = run.save(f"after {number}").sent
        # An error of planning is everyone's, and makes all forget; one of writing comes after it.
        assert (sent == 0) == (place == "write")
        assert run.save(f"and again {number}").sent == 0
    run.check()


def test_after_a_failed_save(tmp_path: Path) -> None:
    run_ranks(_failures, 2, str(tmp_path))


def _groups(rank: int, world: int, folder: str) -> None:
    """A planner that saves with other ranks, or whose coordinator is another one, is told."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[rank // 2]
    model = wrap_fsdp1(Mlp(), process_group=mine)
    optim = adamw(model)
    train_steps(model, optim, 1)
    planner = FlatOptimSavePlanner()

    def save(name: str, group: Any) -> int:
        writer = Recorder(f"{folder}/{name}", fsync=False)
        state = {"optim": FlatOptimState(model, optim)}
        dcp.save(state, storage_writer=writer, planner=planner, process_group=group)
        return writer.sent

    assert save(f"pair {rank // 2}", mine) > 0
    assert save(f"pair {rank // 2} again", mine) == 0
    with pytest.raises(CheckpointException, match="make a planner for each set of ranks"):
        save("all", None)
    assert save("all again", None) > 0
    assert save("all once more", None) == 0


@needs_groups_without_rank_0
def test_another_set_of_ranks(tmp_path: Path) -> None:
    run_ranks(_groups, 4, str(tmp_path))


def test_other_writers_and_copies(tmp_path: Path) -> None:
    model = Mlp()
    optim = adamw(model)
    train_steps(model, optim, 1)
    planner = FlatOptimSavePlanner()
    for number in range(3):
        train_steps(model, optim, 1, first=number + 1)
        state = {"model": FlatModelState(model), "optim": FlatOptimState(model, optim)}
        path = tmp_path / str(number)
        if number == 2:
            planner = pickle.loads(pickle.dumps(planner))  # as to the process of async_save
        dcp.save(state, storage_writer=FileSystemWriter(path), planner=planner, no_dist=True)
        again = Mlp(seed=3)
        other = adamw(again)
        state = {"model": FlatModelState(again), "optim": FlatOptimState(again, other)}
        reader = dcp.FileSystemReader(path)
        dcp.load(state, storage_reader=reader, planner=FlatOptimLoadPlanner(), no_dist=True)
        assert_same(other.state_dict(), optim.state_dict())
        assert_same(again.state_dict(), model.state_dict())


def test_metadata_of_one_save_are_not_those_of_the_next(tmp_path: Path) -> None:
    model = Mlp()
    state = {"model": FlatModelState(model), "step": 1}
    planner = FlatOptimSavePlanner()
    found = []
    for number in range(2):
        writer = StreamingWriter(tmp_path / str(number), fsync=False)
        found.append(dcp.save(state, storage_writer=writer, planner=planner, no_dist=True))
    names = [{info.relative_path for info in each.storage_data.values()} for each in found]
    assert names[0].isdisjoint(names[1])
    assert found[0].storage_meta.save_id != found[1].storage_meta.save_id
