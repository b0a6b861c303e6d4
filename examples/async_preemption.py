"""Save beside training, stop when the machine is to be taken away, resume where it stopped.

    torchrun --nproc-per-node 2 examples/async_preemption.py runs/one

Send SIGTERM to any worker, as schedulers do before they end a job: all ranks save at the end of
that step, and stop.  Start the same line again, with as many ranks as there are then: it resumes.
(``python -m examples.preempted`` does all of that, kills a worker too, and compares the losses.)
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from dcp_fsdp_osd import CheckpointManager, FlatModelState, FlatOptimState

WIDTH = 64


def main(
    url: str, steps: int = 200, on_step: Callable[[int], None] = lambda step: None
) -> list[tuple[int, float]]:
    """Train from the newest checkpoint to `steps`; (step, loss) of each step made here."""
    torch.manual_seed(1)
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 8))
    model = FSDP(layers, device_id=torch.device("cpu"), use_orig_params=True)
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optim, steps)
    state = {
        "model": FlatModelState(model),
        "optim": FlatOptimState(model, optim),
        "schedule": schedule,
    }
    losses = []
    with CheckpointManager(url, save_every=5, keep_last=2) as manager:
        start = manager.restore(state) or 0  # the newest that is whole; None in a new run
        for step in range(start + 1, steps + 1):
            data = torch.Generator().manual_seed(1000 * step + dist.get_rank())
            loss = model(torch.randn(8, WIDTH, generator=data)).square().mean()
            loss.backward()
            optim.step()
            optim.zero_grad()
            schedule.step()
            losses.append((step, loss.item()))
            on_step(step)
            if manager.should_save(step):  # every 5 steps, and when SIGTERM came to any rank
                last = manager.preempted
                # Returns once the state is copied, and writes beside training.  The last save is
                # waited for: it is committed in time, or leaves nothing.
                manager.save(step, state, wait=last, deadline=25 if last else None)
            if manager.preempted:
                break
    return losses  # the manager is closed: all that was saved is committed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url", help="a folder or URL for the run's checkpoints")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    made = main(args.url, args.steps)
    if dist.get_rank() == 0:
        told = f"steps {made[0][0]} to {made[-1][0]}" if made else "nothing left to do"
        print(f"{told} of {args.steps}")
    dist.destroy_process_group()
