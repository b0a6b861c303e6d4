"""Imported on ranks alone, where torchtitan is installed."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
)

from tests.pages import ROOT, blocks_of

ROWS, WIDTH, STEPS = 12, 60, 6


def streaming_checkpoints() -> Any:
    """The class of docs/trainers/torchtitan.md."""
    (block,) = [
        each
        for each in blocks_of(ROOT / "docs/trainers/torchtitan.md")
        if "class StreamingCheckpoints" in each.text
    ]
    module = sys.modules["page"] = types.ModuleType("page")  # torchtitan looks classes up in it
    exec(compile(block.text, "docs/trainers/torchtitan.md", "exec"), vars(module))
    return vars(module)["StreamingCheckpoints"]


class _Position:
    """What torchtitan's trainer keeps beside model and optimizer."""

    step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])


def start(kind: Any, folder: Path, seed: int, mode: str) -> tuple[Any, ...]:
    """Model, optimizers, schedule and position; and the manager of them."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, 301), nn.Tanh(), nn.Linear(301, 7))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    groups = [
        ParamGroupConfig(
            pattern=pattern,
            optimizer_name="AdamW",
            optimizer_kwargs={"lr": 0.01, "weight_decay": decay},
        )
        for pattern, decay in (("bias$", 0.0), (".*", 0.1))
    ]
    optims = OptimizersContainer.Config(implementation="foreach", param_groups=groups).build(
        model_parts=[model]
    )
    schedule = LRSchedulersContainer.Config(warmup_steps=2).build(
        optimizers=optims, training_steps=10
    )
    position = _Position()
    manager = kind.Config(
        enable=True,
        folder=str(folder),
        interval=STEPS // 2,
        async_mode=mode,
        last_save_model_only=False,
    ).build(
        dataloader=None,
        model_parts=[model],
        optimizers=optims,
        lr_schedulers=schedule,
        states={"train_state": position},
        sd_adapter=None,
        base_folder="",
    )
    return model, optims, schedule, position, manager


def train(prepared: tuple[Any, ...], last: int) -> list[float]:
    """Batches are a function of the step, cut by rank; the manager saves every third step."""
    model, optims, schedule, position, manager = prepared
    losses = []
    while position.step < last:
        data = torch.Generator().manual_seed(1000 + position.step)
        rows = torch.randn(ROWS, WIDTH, generator=data)
        loss = model(rows.chunk(dist.get_world_size())[dist.get_rank()]).square().mean()
        loss.backward()
        optims.step()
        schedule.step()
        optims.zero_grad()
        position.step += 1
        total = loss.detach().double() / dist.get_world_size()
        dist.all_reduce(total)
        losses.append(total.item())
        manager.save(position.step)
        manager.maybe_wait_for_staging()
    manager.maybe_wait_for_saving()
    return losses


def whole(folder: Path) -> dict[str, Any]:
    """A run that goes on, and runs that were resumed, by each class from each one's checkpoints."""
    ours = streaming_checkpoints()
    found: dict[str, Any] = {}
    kinds = {"ours": ours, "stock": CheckpointManager}
    for name, kind, mode in (
        ("ours", ours, "disabled"),
        ("ours async", ours, "async"),
        ("stock", CheckpointManager, "disabled"),
    ):
        prepared = start(kind, folder / name, 1, mode)
        half = train(prepared, STEPS // 2)
        prepared[-1].close()
        if name == "stock":
            found["losses"] = half + train(unsaved(prepared), STEPS)
        for reader, other in kinds.items():
            resumed = start(other, folder / name, 2, "disabled")
            assert resumed[-1].load() and resumed[3].step == STEPS // 2
            resumed = unsaved(resumed)
            found[f"{reader} from {name}"] = train(resumed, STEPS)
    return found


class _NoManager:
    def save(self, step: int) -> None:
        pass

    maybe_wait_for_staging = maybe_wait_for_saving = staticmethod(lambda: None)


def unsaved(prepared: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same, saving no more, so that others find the third step's checkpoint alone."""
    return *prepared[:-1], _NoManager()
