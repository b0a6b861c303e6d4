"""Start from the weights of another run: a new head, a frozen trunk, a new optimizer.

    torchrun --nproc-per-node 2 examples/fine_tune.py

The base may have been saved by any number of ranks, under any sharding.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from dcp_fsdp_osd import (
    FlatModelState,
    FlatOptimLoadPlanner,
    FlatOptimSavePlanner,
    FlatOptimState,
    StreamingReader,
    StreamingWriter,
    verify_model_state,
)

WIDTH = 30


class Net(nn.Module):
    def __init__(self, head: str, classes: int) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(WIDTH, 50), nn.Tanh(), nn.Linear(50, WIDTH))
        self.add_module(head, nn.Linear(WIDTH, classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.children():
            x = part(x)
        return x


def train(model: nn.Module, optim: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        data = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        loss = model(torch.randn(8, WIDTH, generator=data)).square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    return losses


def pretrain(folder: str) -> None:
    torch.manual_seed(1)
    model = FSDP(Net("head", 7), device_id=torch.device("cpu"), use_orig_params=True)
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optim, range(3))
    dcp.save(
        {"model": FlatModelState(model), "optim": FlatOptimState(model, optim)},
        storage_writer=StreamingWriter(folder),
        planner=FlatOptimSavePlanner(),
    )


def new_model() -> tuple[FSDP, torch.optim.AdamW]:
    """Parameters that are trained and those that are not go into the same flat tensor only with
    `use_orig_params=True`; the optimizer gets those that are trained."""
    model = Net("classifier", 3)
    model.trunk[0].requires_grad_(False)
    model = FSDP(model, device_id=torch.device("cpu"), use_orig_params=True)
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def main(folder: str, steps: int = 6) -> dict[str, object]:
    """Fine-tune, save in the middle, resume: what was skipped, and both ways' losses."""
    base, tuned = f"{folder}/base", f"{folder}/tuned"
    pretrain(base)

    torch.manual_seed(2)
    model, optim = new_model()
    # strict=False: the base has no `classifier`, which keeps its own first weights, and a `head`
    # that nobody wants.  Leaving "optim" out of the dict leaves the base's optimizer unread.
    planner = FlatOptimLoadPlanner(strict=False)
    dcp.load(
        {"model": FlatModelState(model)}, storage_reader=StreamingReader(base), planner=planner
    )
    changed = {difference.fqn for difference in verify_model_state(model, base)}
    if dist.get_rank() == 0:
        print("left as they are:", *planner.skipped, sep="\n  ")

    train(model, optim, range(steps // 2))
    dcp.save(  # of frozen weights too; the optimizer has state of those that are trained
        {"model": FlatModelState(model), "optim": FlatOptimState(model, optim)},
        storage_writer=StreamingWriter(tuned),
        planner=FlatOptimSavePlanner(),
    )
    losses = train(model, optim, range(steps // 2, steps))

    model, optim = new_model()  # resumed: all must be there, so strict
    dcp.load(
        {"model": FlatModelState(model), "optim": FlatOptimState(model, optim)},
        storage_reader=StreamingReader(tuned),
        planner=FlatOptimLoadPlanner(),
    )
    resumed = train(model, optim, range(steps // 2, steps))
    return {
        "skipped": planner.skipped,
        "changed": changed,
        "losses": losses,
        "resumed": resumed,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", help="where checkpoints go; a temporary one by default")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    place = [args.folder or tempfile.mkdtemp()]
    dist.broadcast_object_list(place)
    result = main(place[0])
    print(f"rank {dist.get_rank()}: went on {result['losses']}, resumed {result['resumed']}")
    dist.destroy_process_group()
