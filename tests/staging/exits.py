"""A process that ends after its background process was replaced, with a save under way:
``python -m tests.staging.exits FOLDER WAY``.  Prints the background processes that it had.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist

from dcp_fsdp_osd import FlatStager, StreamingWriter
from tests.staging.processes import background, kill
from tests.torch_gaps import async_save

_STAGER = FlatStager(shared_memory=True)


def _save(folder: str, number: int) -> Any:
    return async_save(
        {"w": torch.full((4 << 20,), float(number))},
        kind="process",
        storage_writer=StreamingWriter(f"{folder}/step-{number}", fsync=False),
        async_stager=_STAGER,
    )


if __name__ == "__main__":
    where, way = sys.argv[1:]
    dist.init_process_group("gloo", init_method=f"file://{where}/store", rank=0, world_size=1)
    _save(where, 1).result()
    had = background()
    kill(had)
    _save(where, 2).result()
    _save(where, 3)
    print(*had, *background(), flush=True)
    if way == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
