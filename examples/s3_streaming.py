"""Save to S3 and load from it, with nothing on local disk, and see what was moved.

    export AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=...
    torchrun --nproc-per-node 2 examples/s3_streaming.py s3://bucket/run \\
        --endpoint-url http://localhost:9000      # for MinIO and the like; not for AWS

Credentials are found as the AWS tools find them: environment, profile, role.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from dcp_fsdp_osd import (
    FlatModelState,
    FlatOptimLoadPlanner,
    FlatOptimSavePlanner,
    FlatOptimState,
    StreamingReader,
    StreamingWriter,
    latest,
    verify_model_state,
    verify_optim_state,
)


def build(width: int) -> tuple[FSDP, torch.optim.AdamW]:
    layers = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Linear(width, 8))
    model = FSDP(layers, device_id=torch.device("cpu"), use_orig_params=True)
    return model, torch.optim.AdamW(model.parameters())


def state_of(model: FSDP, optim: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    return {"model": FlatModelState(model), "optim": FlatOptimState(model, optim), "step": step}


def main(url: str, options: dict[str, Any] | None = None, width: int = 512) -> int:
    """Train three steps and save each, load the newest; the step that was loaded."""
    model, optim = build(width)
    for step in (1, 2, 3):
        model(torch.randn(4, width)).sum().backward()
        optim.step()
        optim.zero_grad()
        # Parts of 8 MiB go up side by side; the checkpoint exists when its last object,
        # `.metadata`, does.  A writer serves one save.
        writer = StreamingWriter(f"{url}/step-{step}", storage_options=options)
        state = {
            "model": FlatModelState(model),
            "optim": FlatOptimState(model, optim),
            "step": step,
        }
        dcp.save(state, storage_writer=writer, planner=FlatOptimSavePlanner())

    # One rank lists the folder, and all get its answer.
    newest = latest(url, storage_options=options, process_group=dist.group.WORLD)
    if newest is None:
        raise SystemExit(f"no checkpoint at {url}")
    model, optim = build(width)
    state = state_of(model, optim, 0)
    reader = StreamingReader(newest, storage_options=options)
    dcp.load(state, storage_reader=reader, planner=FlatOptimLoadPlanner())

    # Reads all of it once more, and compares each element with the live one.
    assert verify_model_state(model, StreamingReader(newest, storage_options=options)).ok
    assert verify_optim_state(model, optim, StreamingReader(newest, storage_options=options)).ok
    print(
        f"rank {dist.get_rank()}: {newest} through {reader.backend}, "
        f"{writer.stats.bytes / 1e6:.1f} MB up, {reader.stats.bytes / 1e6:.1f} MB down"
    )
    return int(state["step"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url", help="s3://bucket/folder, or anything that fsspec opens")
    parser.add_argument("--endpoint-url", help="of a server that is not AWS")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    main(args.url, {"endpoint_url": args.endpoint_url} if args.endpoint_url else None)
    dist.destroy_process_group()
