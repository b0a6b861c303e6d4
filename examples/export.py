"""Turn the checkpoint of many ranks into one file, for inference or for the hub.

    torchrun --nproc-per-node 2 examples/export.py

The files are streamed: no process holds the model, and no GPU and no process group is needed.
From a shell: ``dcp-osd export CHECKPOINT model.safetensors --key model``.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from dcp_fsdp_osd import (
    FlatModelState,
    FlatOptimSavePlanner,
    FlatOptimState,
    StreamingWriter,
)
from dcp_fsdp_osd.tools import Checkpoint, export_safetensors, export_torch


def main(folder: Path) -> dict[str, torch.Tensor]:
    """Save, export on rank 0, load the file into a plain model; its output for ones."""
    torch.manual_seed(1)
    model = FSDP(layers(), device_id=torch.device("cpu"), use_orig_params=True)
    optim = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 30)).sum().backward()
    optim.step()
    dcp.save(
        {"model": FlatModelState(model), "optim": FlatOptimState(model, optim), "step": 1},
        storage_writer=StreamingWriter(folder / "step-1"),
        planner=FlatOptimSavePlanner(),
    )
    outputs = {"fsdp": model(torch.ones(1, 30)).detach()}
    if dist.get_rank() == 0:  # any process will do, later and elsewhere too
        with Checkpoint(folder / "step-1") as checkpoint:  # or "s3://bucket/run/step-1"
            export_torch(checkpoint, folder / "all.pt")  # all that was saved, nested as it was
            export_safetensors(checkpoint, folder / "model.safetensors", key="model")
        weights = torch.load(folder / "all.pt", weights_only=True)["model"]
        plain = layers()
        plain.load_state_dict(weights)  # names and shapes are the unwrapped model's
        outputs["plain"] = plain(torch.ones(1, 30)).detach()
    return outputs


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(30, 50), nn.Tanh(), nn.Linear(50, 7))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", help="where the files go; a temporary one by default")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    place = [args.folder or tempfile.mkdtemp()]
    dist.broadcast_object_list(place)
    found = main(Path(place[0]))
    if dist.get_rank() == 0:
        same = torch.equal(found["fsdp"], found["plain"])
        print(f"{place[0]}/all.pt and model.safetensors: outputs {'equal' if same else 'DIFFER'}")
    dist.destroy_process_group()
