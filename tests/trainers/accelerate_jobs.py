"""Imported on ranks alone, because importing accelerate takes a second."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, fsdp_utils, merge_fsdp_weights, patch_environment
from safetensors.torch import load_file
from torch import nn

from benchmarks.wire import WireBytes
from dcp_fsdp_osd.trainers.accelerate import flat_checkpoints

WIDTH, ROWS = 60, 12


def start(version: int, seed: int, **options: Any) -> tuple[Accelerator, Any, Any, Any]:
    """Accelerator, model, optimizer and schedule, prepared for FSDP.

    accelerate chooses FSDP where there is an accelerator alone, so the choice is made for it; what
    it does then is its own.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    settings = {"state_dict_type": "SHARDED_STATE_DICT", **options}
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version,
        auto_wrap_policy="size_based_wrap",
        min_num_params=1000,
        use_orig_params=True if version == 1 else None,
        **settings,
    )
    rank, world = dist.get_rank(), dist.get_world_size()
    with patch_environment(
        rank=rank, local_rank=rank, world_size=world, local_world_size=world, master_port=1
    ):
        state = PartialState(cpu=True)
        state.distributed_type, state.device = DistributedType.FSDP, torch.device("cpu")
        # Else schedules step once for each process, and differ by world size.
        accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False)
    accelerator.state.fsdp_plugin = plugin
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, 301), nn.Tanh(), nn.Linear(301, 7))
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optim, 2, gamma=0.5)
    return accelerator, *accelerator.prepare(model, optim, schedule)


def train(prepared: tuple[Any, ...], first: int, last: int) -> list[float]:
    """Batches are a function of the step, cut by rank."""
    accelerator, model, optim, schedule = prepared
    losses = []
    for step in range(first, last):
        data = torch.Generator().manual_seed(1000 + step)
        rows = torch.randn(ROWS, WIDTH, generator=data)
        loss = model(rows.chunk(dist.get_world_size())[dist.get_rank()]).square().mean()
        accelerator.backward(loss)
        optim.step()
        schedule.step()
        optim.zero_grad()
        total = loss.detach().double() / dist.get_world_size()
        dist.all_reduce(total)
        losses.append(total.item())
    return losses


def resume(version: int, folder: Path, *, flat: bool) -> list[float]:
    prepared = start(version, seed=2)
    if flat:
        with flat_checkpoints():
            prepared[0].load_state(folder)
    else:
        prepared[0].load_state(folder)
    return train(prepared, 3, 6)


def _merged(checkpoint: Path) -> dict[str, torch.Tensor]:
    """By accelerate's own command, from a checkpoint of ours or its own.  Collective."""
    into = checkpoint.parent / "merged"
    merge_fsdp_weights(str(checkpoint), str(into))
    return dict(sorted(load_file(into / "model.safetensors").items()))


def whole(version: int, folder: Path) -> dict[str, Any]:
    """Saved by ours and by accelerate itself, resumed by both."""
    warnings.filterwarnings("ignore")
    ours, stock = folder / f"ours{version}", folder / f"stock{version}"
    prepared = start(version, seed=1)
    accelerator = prepared[0]
    before = fsdp_utils.save_fsdp_model
    found: dict[str, Any] = {"losses": train(prepared, 0, 3)}
    with flat_checkpoints(), WireBytes() as wire:
        accelerator.save_state(ours)
    found["sent"] = wire.tensors
    assert fsdp_utils.save_fsdp_model is before
    with WireBytes() as wire:
        accelerator.save_state(stock)
    found["sent by stock"] = wire.tensors
    found["losses"] += train(prepared, 3, 6)
    found["ours from ours"] = resume(version, ours, flat=True)
    found["stock from stock"] = resume(version, stock, flat=False)
    found["stock from ours"] = resume(version, ours, flat=False)
    found["ours from stock"] = resume(version, stock, flat=True)
    merged, its = (_merged(saved / "pytorch_model_fsdp_0") for saved in (ours, stock))
    assert list(merged) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    found["merged"] = all(torch.equal(merged[name], its[name]) for name in its)
    return found


def errors(folder: Path) -> list[str]:
    found = []
    accelerator, *_ = start(1, seed=1, state_dict_type="FULL_STATE_DICT")
    try:
        with flat_checkpoints():
            accelerator.save_state(folder / "full")
    except ValueError as error:
        found.append(str(error))
    original = fsdp_utils.load_fsdp_optimizer
    for other in (None, lambda plugin, accelerator, everything: None):
        fsdp_utils.load_fsdp_optimizer = other  # another version's
        try:
            with flat_checkpoints():
                pass
        except ImportError as error:
            found.append(str(error))
        finally:
            fsdp_utils.load_fsdp_optimizer = original
    return found
