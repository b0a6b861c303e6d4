"""A rank of a managed training run that is killed at any moment: see ``test_kill.py``."""

from __future__ import annotations

import time
import traceback
import warnings
from datetime import timedelta
from multiprocessing import connection

import torch
import torch.distributed as dist

from tests.manager.jobs import Run, digest, manager

__all__ = ["EVERY", "KEEP_EVERY", "KEEP_LAST", "train"]

EVERY, KEEP_LAST, KEEP_EVERY = 2, 2, 40
GROUP_TIMEOUT = 10.0


def train(
    rank: int, folder: str, rendezvous: str, last: int, parent: connection.Connection
) -> None:
    """Resume and train until step `last`; tells the step resumed from, then (step, digest) of each.

    Each rank's weights and optimizer state are in the digest.
    """
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=GROUP_TIMEOUT),
    )
    options = {"keep_last": KEEP_LAST, "keep_every": KEEP_EVERY, "stall_seconds": 2.0}
    try:
        with manager(folder, save_every=EVERY, **options) as saving:
            run = Run(seed=1)
            parent.send(("ready", time.monotonic()))
            parent.send(("resumed", run.restored(saving)))
            while run.step < last:
                run.train()
                parent.send((run.step, digest(run)))
                if saving.should_save(run.step):
                    saving.save(run.step, run.state())
        parent.send(("done", None))
    except BaseException:
        parent.send(("raised", traceback.format_exc()))
