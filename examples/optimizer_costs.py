"""What saving and loading the optimizer state alone costs: PyTorch's own way, and ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import (
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)

from benchmarks.heap import release_freed_memory
from benchmarks.measure import measure
from benchmarks.wire import WireBytes
from dcp_fsdp_osd import (
    FlatOptimLoadPlanner,
    FlatOptimSavePlanner,
    StreamingReader,
    StreamingWriter,
)
from examples.tiny_lm import Trainer

__all__ = ["optimizer_costs"]


def _sharded(model: torch.nn.Module) -> Any:
    kind = StateDictType.SHARDED_STATE_DICT
    return FSDP.state_dict_type(
        model, kind, ShardedStateDictConfig(), ShardedOptimStateDictConfig()
    )


def _stock_save(trainer: Trainer, folder: Path) -> None:
    with _sharded(trainer.model):
        state = FSDP.optim_state_dict(trainer.model, trainer.optim)
    dcp.save({"optim": state}, storage_writer=dcp.FileSystemWriter(folder))


def _our_save(trainer: Trainer, folder: Path) -> None:
    planner = FlatOptimSavePlanner(trainer.model, trainer.optim)
    writer = StreamingWriter(folder, overwrite=True)
    dcp.save({"optim": trainer.optim.state_dict()}, storage_writer=writer, planner=planner)


def _stock_load(trainer: Trainer, folder: Path) -> None:
    optim = trainer.new_optim()
    state = {"optim": get_optimizer_state_dict(trainer.model, optim)}
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder))
    set_optimizer_state_dict(trainer.model, optim, state["optim"])


def _our_load(trainer: Trainer, folder: Path) -> None:
    optim = trainer.new_optim()
    state: dict[str, Any] = {"optim": {}}
    planner = FlatOptimLoadPlanner(trainer.model, optim)
    dcp.load(state, storage_reader=StreamingReader(folder), planner=planner)
    optim.load_state_dict(state["optim"])


def _cost(work: Callable[[Trainer, Path], None], trainer: Trainer, folder: Path) -> dict[str, Any]:
    with WireBytes() as wire:
        work(trainer, folder)
    release_freed_memory()
    run = measure(lambda: work(trainer, folder), barrier=dist.barrier)
    return {"seconds": run.wall, "peak": run.peak_extra, "between": wire.tensors}


def optimizer_costs(trainer: Trainer, folder: Path) -> dict[str, dict[str, Any]]:
    """By way: ``seconds``, ``peak`` bytes above the start, tensor bytes sent ``between`` ranks.

    Of this rank.  Each way runs once to warm up while bytes between ranks are counted, then once
    for time and memory.  The trainer is left as it was.
    """
    return {
        "save, PyTorch": _cost(_stock_save, trainer, folder / "stock"),
        "save, ours": _cost(_our_save, trainer, folder / "ours"),
        "load, PyTorch": _cost(_stock_load, trainer, folder / "stock"),
        "load, ours": _cost(_our_load, trainer, folder / "ours"),
    }
