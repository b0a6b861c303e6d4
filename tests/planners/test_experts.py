"""Experts: ranks that own different parameters beside a dense part that all of them share.

The judge is one process that holds all experts and is trained on the same data: on 2 and 4 ranks
means of equal gradients are exact, so that everything is the same to the bit.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dcp_fsdp_osd import FlatModelState, FlatOptimLoadPlanner, FlatOptimSavePlanner
from tests import ranks
from tests.models import Block, Mlp, wrap_fsdp1
from tests.planners.checks import assert_same, differences
from tests.ranks import run_ranks
from tests.torch_gaps import train_fsdp2_on_cpu


class Mixture(nn.Module):
    """A dense part, and some of four experts, under the names that they have in the whole model.

    In each step two of the experts get no data, so that they come to different numbers of steps.
    """

    def __init__(self, numbers: Iterable[int], seed: int = 0) -> None:
        super().__init__()
        self.dense: nn.Module = Mlp(seed=seed)
        self.experts = nn.ModuleDict()
        for number in numbers:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(100 * seed + number)
                self.experts[str(number)] = Block(6, 5)

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        loss = self.dense(x).pow(2).mean()
        for name, expert in self.experts.items():
            number = int(name)
            if (number + step) % 4 < 2:
                loss = loss + expert(x.roll(number, 1)).pow(2).mean()
        return loss


# (wrapping of the dense part, of the experts; which experts a rank has)
LAYOUTS: dict[str, tuple[str, str, str]] = {
    "one process": ("", "", "all"),
    "FSDP1, one each": ("fsdp1", "", "one each"),
    "FSDP1, swapped": ("fsdp1", "", "swapped"),
    "FSDP1, of FSDP1": ("fsdp1", "fsdp1", "halves"),
    "FSDP1 flat, of FSDP1 flat": ("fsdp1_flat", "fsdp1_flat", "halves"),
    "FSDP2, of FSDP2": ("fsdp2", "fsdp2", "halves"),
    "FSDP2, other halves": ("fsdp2", "", "other halves"),
    "DDP, copies": ("ddp", "", "halves"),
}


def _numbers(place: str, rank: int, world: int) -> list[int]:
    upper = rank >= world // 2
    return {
        "all": [0, 1, 2, 3],
        "one each": [rank],
        "swapped": [rank ^ 1],
        "halves": [2, 3] if upper else [0, 1],
        "other halves": [0, 3] if upper else [2, 1],
    }[place]


def _build(rank: int, world: int, name: str, seed: int = 0) -> nn.Module:
    dense, wrap, place = LAYOUTS[name]
    model = Mixture(_numbers(place, rank, world), seed)
    if wrap:
        mesh = ranks.mesh(2, world // 2, names=("ep", "dp"))["dp"]
        for number, expert in list(model.experts.items()):
            if wrap == "fsdp2":
                fully_shard(expert, mesh=mesh)
            else:
                model.experts[number] = wrap_fsdp1(
                    expert,
                    policy="root",
                    process_group=mesh.get_group(),
                    use_orig_params=wrap == "fsdp1",
                )
    if dense in ("fsdp1", "fsdp1_flat"):
        ignored = None if wrap else [model.experts]
        return wrap_fsdp1(
            model, policy="root", ignored_modules=ignored, use_orig_params=dense == "fsdp1"
        )
    if dense == "fsdp2":
        ignored_params = set() if wrap else set(model.experts.parameters())
        return fully_shard(model, ignored_params=ignored_params)
    if dense == "ddp":
        model.dense = DistributedDataParallel(model.dense)
    return model


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The experts, of which each rank has others, are a param group of their own."""
    groups: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for name, param in model.named_parameters():
        groups["experts" in name].append(param)
    dense, experts = groups
    return torch.optim.AdamW([{"params": dense}, {"params": experts, "lr": 0.02}], lr=0.01)


def _train(model: nn.Module, optim: torch.optim.Optimizer, steps: range) -> None:
    train_fsdp2_on_cpu(model)
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        model(torch.randn(4, 6, generator=generator), step).backward()
        optim.step()
        optim.zero_grad()


def _trained(rank: int, world: int, name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = _build(rank, world, name)
    optim = _adamw(model)
    _train(model, optim, range(3))
    return model, optim


def _weights(model: nn.Module) -> list[torch.Tensor]:
    params = [param.detach() for param in model.parameters()]
    return [p.to_local() if isinstance(p, DTensor) else p for p in params]


def _save(rank: int, world: int, path: str, names: list[str]) -> None:
    for name in names:
        model, optim = _trained(rank, world, name)
        state = {"optim": optim.state_dict(), "model": FlatModelState(model)}
        dcp.save(
            state,
            storage_writer=FileSystemWriter(f"{path}/{world} {name}"),
            planner=FlatOptimSavePlanner(model, optim),
        )


class _Noting(FileSystemReader):
    """Stock's reader, which notes the key of each entry that it reads."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        self.keys = [item.storage_index.fqn for item in plan.items]
        return super().read_data(plan, planner)


def _load_one(
    rank: int, world: int, path: str, name: str, broadcast: bool
) -> tuple[nn.Module, torch.optim.Optimizer, list[str]]:
    """Another model, which has nothing of the one that was saved, and its optimizer."""
    model = _build(rank, world, name, seed=1)
    optim = _adamw(model)
    state: dict[str, Any] = {"optim": {}, "model": FlatModelState(model)}
    planner = FlatOptimLoadPlanner(model, optim, broadcast=broadcast)
    reader = _Noting(path)
    dcp.load(state, storage_reader=reader, planner=planner)
    assert (planner.exchanged is not None) == (broadcast and dist.is_initialized())
    optim.load_state_dict(state["optim"])
    return model, optim, reader.keys


def _load(rank: int, world: int, folder: str, pairs: dict[str, list[str]]) -> None:
    for n, (name, paths) in enumerate(pairs.items()):
        model, optim = _trained(rank, world, name)
        expected = copy.deepcopy((optim.state_dict(), _weights(model)))
        _train(model, optim, range(3, 5))
        for m, path in enumerate(paths):
            place = f"{folder}/{path}"
            again, other, _ = _load_one(rank, world, place, name, bool((n + m) % 2))
            wrong = differences((other.state_dict(), _weights(again)), expected)
            assert not wrong, (name, path, wrong[:5])
            _train(again, other, range(3, 5))
            assert_same(other.state_dict(), optim.state_dict())
            assert_same(_weights(again), _weights(model))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("each", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_experts_elsewhere(tmp_path: Path, each: bool) -> None:
    """Experts on other ranks at the load (0 and 1, say, have swapped theirs), at 4 ranks, 2 and 1.

    Each layout at 4 ranks is loaded from another at 4, from one at 2 and from one process, or from
    one of these three, and then fewer layouts.
    """
    two = ["FSDP1, of FSDP1", "FSDP2, of FSDP2", "DDP, copies"][: 3 if each else 2]
    four = [name for name in LAYOUTS if name != "one process" and (each or name not in two)]
    _save(0, 1, str(tmp_path), ["one process"])
    run_ranks(_save, 4, str(tmp_path), four)
    run_ranks(_save, 2, str(tmp_path), two)
    saved = sorted(path.name for path in tmp_path.iterdir())
    assert len(saved) == 1 + len(four) + len(two)
    to_four = {
        name: [f"4 {four[n - 1]}", f"2 {two[n % len(two)]}", "1 one process"][
            slice(None) if each else slice(n % 3, n % 3 + 1)
        ]
        for n, name in enumerate(four)
    }
    to_two = {name: [f"4 {four[n + 1]}"] for n, name in enumerate(two)}
    _load(0, 1, str(tmp_path), {"one process": saved})
    run_ranks(_load, 4, str(tmp_path), to_four, timeout=120)
    run_ranks(_load, 2, str(tmp_path), to_two)


def _reads(rank: int, world: int, path: str, name: str, broadcast: bool) -> list[str]:
    model, optim, keys = _load_one(rank, world, path, name, broadcast)
    trained, its = _trained(rank, world, name)
    assert_same(optim.state_dict(), its.state_dict())
    assert_same(_weights(model), _weights(trained))
    return keys


def test_the_dense_part_is_read_once(tmp_path: Path) -> None:
    """With ``broadcast=True``, and an expert by a rank that has it."""
    name = "DDP, copies"
    run_ranks(_save, 4, str(tmp_path), [name])
    read = run_ranks(_reads, 4, f"{tmp_path}/4 {name}", name, True)
    alone = run_ranks(_reads, 4, f"{tmp_path}/4 {name}", name, False)
    once = Counter(key for keys in read for key in keys)
    each = Counter(key for keys in alone for key in keys)
    assert once.keys() == each.keys()
    assert set(once.values()) == {1}
    for key, count in each.items():
        assert count == (2 if "experts" in key else 4), key
    for rank, keys in enumerate(read):
        owned = _numbers("halves", rank, 4)
        found = {int(key.split("experts.")[1][0]) for key in keys if "experts" in key}
        assert found <= set(owned)
