"""What ranks of these tests run: a small FSDP1 model under a manager."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import CheckpointException

from dcp_fsdp_osd import CheckpointManager, FlatModelState, FlatOptimState
from tests.models import Mlp, adamw, train_steps, wrap_fsdp1

__all__ = ["Run", "damage", "digest", "manager", "raised"]


def manager(url: Any, **options: Any) -> CheckpointManager:
    return CheckpointManager(url, **{"preempt_signals": (), **options})


class Run:
    """A model in training; ``seed`` gives the first weights."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        model: nn.Module = Mlp(seed=seed)
        self.model = wrap_fsdp1(model) if dist.is_initialized() else model
        self.optim = adamw(self.model)
        self.step = 0

    def state(self) -> dict[str, Any]:
        return {
            "model": FlatModelState(self.model),
            "optim": FlatOptimState(self.model, self.optim),
            "step": self.step,
        }

    def train(self, steps: int = 1) -> Run:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train_steps(self.model, self.optim, steps, first=self.step)
        self.step += steps
        return self

    def restored(self, manager: CheckpointManager, **options: Any) -> int | None:
        state = self.state()
        found = manager.restore(state, **options)
        self.step = state["step"]
        return found


def digest(run: Run) -> int:
    """One number for this rank's weights and optimizer state, and the step."""
    crc = run.step
    for parameter in run.model.parameters():
        state = run.optim.state.get(parameter, {})
        for value in [parameter.detach(), *(state[name] for name in sorted(state))]:
            crc = zlib.crc32(value.reshape(-1).view(torch.uint8).numpy(), crc)
    return crc


def damage(folder: Path, how: str) -> None:
    """Flip a byte in the middle of each data file, or of the metadata, or delete data files."""
    names = [".metadata"] if how == "metadata" else [p.name for p in folder.glob("*.distcp")]
    for name in names:
        if how == "missing":
            (folder / name).unlink()
            continue
        data = bytearray((folder / name).read_bytes())
        data[len(data) // 2] ^= 0x55
        (folder / name).write_bytes(data)


def raised(call: Callable[[], object]) -> str:
    """What `call` raises, in words."""
    try:
        call()
    except (Exception, CheckpointException) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
