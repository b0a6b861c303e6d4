"""Models that several ranks hold alike, and readers that count, for the tests of the exchange."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests import ranks
from tests.models import MODELS, Mlp, train_steps, wrap_fsdp1
from tests.planners.checks import OPTIMIZERS

KINDS = ["hsdp", "hsdp_flat", "no_shard", "fsdp2", "ddp"]


class CountingReader(FileSystemReader):
    """Stock's reader, which notes what it reads: (file, offset, length) of each item's entry."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.entries: list[tuple[str, int, int]] = []

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            self.entries.append((info.relative_path, info.offset, info.length))
        return super().read_data(plan, planner)

    @property
    def sizes(self) -> dict[tuple[str, int], int]:
        """Of all entries of the checkpoint."""
        return {(i.relative_path, i.offset): i.length for i in self.storage_data.values()}


def large() -> nn.Module:
    """About 18 MiB of AdamW state."""
    return Mlp(width=384, hidden=1536)


def wrapped(
    kind: str,
    world: int,
    *,
    steps: int,
    model: Any = "mlp",
    optim: str = "adamw",
    group: Any = None,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of one of the replicated kinds, and its optimizer; ``model``: a name or a builder."""
    module = MODELS[model]() if isinstance(model, str) else model()
    if kind in ("hsdp", "hsdp_flat", "fsdp2"):
        mesh = ranks.mesh(2, world // 2, names=("replicate", "shard"))
    if kind in ("hsdp", "hsdp_flat"):
        module = wrap_fsdp1(
            module,
            strategy="HYBRID_SHARD",
            device_mesh=mesh,
            use_orig_params=kind == "hsdp",
        )
    elif kind == "no_shard":
        module = wrap_fsdp1(module, strategy="NO_SHARD")
    elif kind == "fsdp2":
        for block in module.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(module, mesh=mesh)
    elif kind == "ddp":
        module = DistributedDataParallel(module, process_group=group)
    elif kind == "fsdp":
        module = wrap_fsdp1(module, process_group=group)
    optimizer = OPTIMIZERS[optim](module.parameters())
    train_steps(module, optimizer, steps)
    return module, optimizer


def whole(model: Any, optim: Any) -> Any:
    """The full optimizer state, gathered by stock."""
    options = StateDictOptions(full_state_dict=True)
    return get_optimizer_state_dict(model, optim, options=options)
