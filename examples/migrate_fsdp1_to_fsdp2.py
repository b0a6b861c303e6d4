"""Move a run from FSDP1 to FSDP2 in the middle: the checkpoint is loaded as it is.

    torchrun --nproc-per-node 2 examples/migrate_fsdp1_to_fsdp2.py

Nothing is converted: a checkpoint holds whole tensors by the model's own names, whoever cut them.
The way back, another number of ranks, DDP or one process go the same way.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard

from dcp_fsdp_osd import (
    FlatModelState,
    FlatOptimLoadPlanner,
    FlatOptimSavePlanner,
    FlatOptimState,
    StreamingReader,
    StreamingWriter,
)

WIDTH = 30


def layers(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, 50), nn.Tanh(), nn.Linear(50, 7))


def fsdp1(seed: int) -> nn.Module:
    return FSDP(layers(seed), device_id=torch.device("cpu"), use_orig_params=True)


def fsdp2(seed: int, mesh: DeviceMesh) -> nn.Module:
    return fully_shard(layers(seed), mesh=mesh)


def train(model: nn.Module, optim: torch.optim.Optimizer, steps: range) -> list[float]:
    """This rank's losses; batches are a function of step and rank."""
    losses = []
    for step in steps:
        data = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        loss = model(torch.randn(8, WIDTH, generator=data)).square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    return losses


def state_of(model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, object]:
    """The same lines for both: the Statefuls see how the model is sharded."""
    return {"model": FlatModelState(model), "optim": FlatOptimState(model, optim)}


def main(
    folder: str, steps: int = 6, mesh: DeviceMesh | None = None
) -> tuple[list[float], list[float]]:
    """Losses after the save, of FSDP1 that went on and of FSDP2 that loaded."""
    model = fsdp1(seed=1)
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optim, range(steps // 2))
    dcp.save(
        state_of(model, optim),
        storage_writer=StreamingWriter(folder),
        planner=FlatOptimSavePlanner(),
    )
    as_before = train(model, optim, range(steps // 2, steps))

    moved = fsdp2(seed=2, mesh=mesh or init_device_mesh("cpu", (dist.get_world_size(),)))
    optim = torch.optim.AdamW(moved.parameters(), lr=0.01)
    dcp.load(
        state_of(moved, optim),
        storage_reader=StreamingReader(folder),
        planner=FlatOptimLoadPlanner(),
    )
    return as_before, train(moved, optim, range(steps // 2, steps))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", help="where the checkpoint goes; a temporary one by default")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    place = [args.folder or tempfile.mkdtemp()]
    dist.broadcast_object_list(place)  # all ranks write to the same checkpoint
    for before, after in zip(*main(place[0]), strict=True):
        same = "equal" if before == after else f"{abs(before - after) / before:.0e} apart"
        print(f"rank {dist.get_rank()}: loss under FSDP1 {before}, under FSDP2 {after}: {same}")
    dist.destroy_process_group()
