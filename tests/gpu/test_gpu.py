"""What differs on an accelerator; without one the same code runs on the CPU, lest it rot.

``make test-gpu`` runs these where there is one; one GPU is enough: NCCL at world size 1, and gloo
for two ranks that share it.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import CPUOffload, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from dcp_fsdp_osd import (
    FlatModelState,
    FlatOptimLoadPlanner,
    FlatOptimSavePlanner,
    FlatOptimState,
    FlatStager,
    StreamingReader,
    StreamingWriter,
    verify_model_state,
    verify_optim_state,
)
from tests.models import Mlp, train_steps
from tests.planners.checks import assert_same
from tests.ranks import run_ranks
from tests.torch_gaps import HAS_STAGERS, async_save, lacks

pytestmark = pytest.mark.gpu

ON_GPU = torch.accelerator.is_available()
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "foreach": ({}, {"foreach": True}),
    "flat": ({"use_orig_params": False}, {}),
    "fused": ({}, {"fused": True}),
    "capturable": ({}, {"capturable": True}),
    "offload": ({"cpu_offload": CPUOffload(offload_params=True)}, {}),
    "NO_SHARD": ({"sharding_strategy": ShardingStrategy.NO_SHARD}, {}),
}


def _device() -> torch.device:
    found = torch.accelerator.current_accelerator() if ON_GPU else None
    return torch.device("cpu") if found is None else torch.device(found.type, 0)


def _make(
    case: str, seed: int, group: dist.ProcessGroup
) -> tuple[nn.Module, torch.optim.Optimizer]:
    wrapping, options = CASES[case]
    device = _device()
    if not ON_GPU:
        options = {k: v for k, v in options.items() if k != "capturable"}
    model = FSDP(
        Mlp(seed=seed),
        device_id=device,
        process_group=group,
        **{"use_orig_params": True, **wrapping},
    )
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, **options)


def _group(world: int) -> dist.ProcessGroup:
    """NCCL wants a GPU for each rank."""
    nccl = world == 1 and _device().type == "cuda"
    return dist.new_group(backend="nccl" if nccl else "gloo")


def _state(model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": FlatModelState(model), "optim": FlatOptimState(model, optim)}


def _all(model: nn.Module, optim: torch.optim.Optimizer) -> Any:
    weights = [param.detach().clone() for param in model.parameters()]
    return copy.deepcopy((optim.state_dict(), weights))


def _devices(optim: torch.optim.Optimizer) -> list[tuple[int, str, str]]:
    return [
        (number, name, value.device.type)
        for number, state in optim.state_dict()["state"].items()
        for name, value in state.items()
    ]


def _round(rank: int, world: int, folder: str) -> None:
    group = _group(world)
    for case in CASES:
        if case == "offload" and not ON_GPU:  # FSDP wants to pin memory
            continue
        path = f"{folder}/{case}"
        model, optim = _make(case, 0, group)
        train_steps(model, optim, 2)
        dcp.save(
            _state(model, optim),
            storage_writer=StreamingWriter(path, fsync=False),
            planner=FlatOptimSavePlanner(),
        )
        saved, devices = _all(model, optim), _devices(optim)
        assert verify_optim_state(model, optim, path).ok and verify_model_state(model, path).ok
        train_steps(model, optim, 1, first=2)
        for broadcast in (False, True):
            again, other = _make(case, 1, group)
            planner = FlatOptimLoadPlanner(broadcast=broadcast)
            reader = StreamingReader(path)
            dcp.load(_state(again, other), storage_reader=reader, planner=planner)
            assert (planner.exchanged is not None) == (broadcast and world > 1)
            assert_same(_all(again, other), saved)
            assert _devices(other) == devices
            train_steps(again, other, 1, first=2)
            assert_same(_all(again, other), _all(model, optim))


@pytest.mark.parametrize("world", [1, 2])
def test_save_load_and_the_next_step(tmp_path: Path, world: int) -> None:
    run_ranks(_round, world, str(tmp_path), timeout=180)


def _asynchronous(rank: int, world: int, folder: str, kind: str) -> None:
    group, own = _group(world), dist.new_group(backend="gloo")
    model, optim = _make("fused", 0, group)
    stager = FlatStager(shared_memory=kind == "process")
    expected = []
    for number in range(3):
        train_steps(model, optim, 1, first=number)
        expected.append(_all(model, optim))
        future = async_save(
            _state(model, optim),
            kind=kind,
            storage_writer=StreamingWriter(f"{folder}/{number}", fsync=False),
            planner=FlatOptimSavePlanner(),
            process_group=own,
            async_stager=stager,
        )
        train_steps(model, optim, 1, first=number + 10)  # changes all while it is saved
        future.result()
    stager.close()
    for number, saved in enumerate(expected):
        again, other = _make("fused", 1, group)
        reader = StreamingReader(f"{folder}/{number}")
        dcp.load(_state(again, other), storage_reader=reader, planner=FlatOptimLoadPlanner())
        assert_same(_all(again, other), saved)


@lacks(not HAS_STAGERS, "dcp.async_save(async_stager=...)")
@pytest.mark.parametrize(
    "kind",
    ["thread", pytest.param("process", marks=() if ON_GPU else pytest.mark.slow)],
)
def test_asynchronous_saves(tmp_path: Path, kind: str) -> None:
    run_ranks(_asynchronous, 1, str(tmp_path), kind, timeout=120)


def test_staging_pins_what_lies_on_the_accelerator() -> None:
    device = _device()
    state = {"on": torch.randn(1000, 3, device=device), "cpu": torch.arange(5), "step": 3}
    staged = FlatStager().stage(state)
    assert_same(staged["on"], state["on"].cpu())
    assert staged["on"].is_pinned() == ON_GPU
