"""State of which ranks hold replicas: one rank's is saved, so what differs is told."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_module
from torch.nn.parallel import DistributedDataParallel

from dcp_fsdp_osd.tree import fingerprint
from tests.models import Mlp, train_steps, wrap_fsdp1
from tests.planners.checks import OPTIMIZERS, save
from tests.ranks import run_ranks


def _mesh() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def _hybrid(**options: Any) -> nn.Module:
    return wrap_fsdp1(Mlp(), strategy="HYBRID_SHARD", device_mesh=_mesh(), **options)


def _fsdp2() -> nn.Module:
    model: nn.Module = fully_shard(Mlp(), mesh=_mesh())
    return model


def _replicated() -> nn.Module:
    return distribute_module(Mlp(), init_device_mesh("cpu", (4,)))


# The layout, and which ranks hold what rank 3 holds.
LAYOUTS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "DDP": (lambda: DistributedDataParallel(Mlp()), "[0, 1, 2] / [3]"),
    "NO_SHARD": (lambda: wrap_fsdp1(Mlp(), strategy="NO_SHARD"), "[0, 1, 2] / [3]"),
    "NO_SHARD flat": (
        lambda: wrap_fsdp1(Mlp(), strategy="NO_SHARD", use_orig_params=False),
        "[0, 1, 2] / [3]",
    ),
    "hybrid": (_hybrid, "[1] / [3]"),
    "hybrid flat": (lambda: _hybrid(use_orig_params=False), "[1] / [3]"),
    "FSDP2 hybrid": (_fsdp2, "[1] / [3]"),
    "replicated DTensors": (_replicated, "[0, 1, 2] / [3]"),
}


def _step(model: nn.Module, optim: torch.optim.Optimizer, name: str) -> None:
    if name != "replicated DTensors":
        return train_steps(model, optim, 1)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    return optim.step()


def _states(optim: torch.optim.Optimizer) -> list[torch.Tensor]:
    found = [state["exp_avg"] for state in optim.state.values()]
    local = [value.to_local() if isinstance(value, DTensor) else value for value in found]
    return [value for value in local if value.numel()]


def _attempt(model: nn.Module, optim: Any, path: str) -> str:
    """What is said of it: the error, or on the coordinator the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            save(model, optim, path)
        except CheckpointException as error:
            return str(error)
    return "\n".join(str(each.message) for each in caught if "replicas" in str(each.message))


def _unequal(rank: int, world: int, path: str) -> dict[str, tuple[str, str, str]]:
    texts = {}
    for name, (build, _) in LAYOUTS.items():
        model = build()
        optim = OPTIMIZERS["adamw"](model.parameters())
        _step(model, optim, name)
        before = _attempt(model, optim, f"{path}/{name}/equal")
        if rank == 3:
            _states(optim)[0].view(-1)[-1] += 1
        shaped = _attempt(model, optim, f"{path}/{name}/shaped")
        if rank == 3:
            _states(optim)[0].view(-1)[-1] -= 1
        odd = ""
        if name in ("DDP", "NO_SHARD"):  # as Kron's Q, drawn by each rank for itself
            for number, state in enumerate(optim.state.values()):
                generator = torch.Generator().manual_seed(number + rank)
                state["q"] = torch.randn((3, 3), generator=generator)
            odd = _attempt(model, optim, f"{path}/{name}/odd")
        texts[name] = before, shaped, odd
    return texts


def test_unequal_replicas_are_told(tmp_path: Path) -> None:
    """Of state like its parameter in a warning, of other state in an error on all ranks."""
    for rank, said in enumerate(run_ranks(_unequal, 4, str(tmp_path))):
        for name, (before, shaped, odd) in said.items():
            assert not before, name
            assert "LayoutError" not in shaped, name
            if rank == 0:
                assert ".exp_avg" in shaped, name
                assert f"ranks {LAYOUTS[name][1]}" in shaped, f"{name}: {shaped}"
                assert "dist.broadcast" in shaped, name
            if name in ("DDP", "NO_SHARD"):
                assert "LayoutError" in odd, name
                assert ".q: ranks [0] / [1] / [2] / [3]" in odd, f"{name}: {odd}"


def test_a_fingerprint_tells_what_differs_anywhere() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.complex128, torch.uint8):
        value = torch.arange(2**21 + 3).to(dtype)
        known = {fingerprint(value)}
        for at in (0, 2**20, -1):
            other = value.clone()
            other[at] += 1
            if not torch.equal(other, value):  # bfloat16 has no room for one more
                known.add(fingerprint(other))
                assert fingerprint(value) not in known - {fingerprint(value)}
        assert len(known) > (2 if dtype is torch.bfloat16 else 3) - 1
        moved = torch.cat([value[:1], value])[1:]  # not on a multiple of 8 bytes
        assert fingerprint(moved) == fingerprint(value)
