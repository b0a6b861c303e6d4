"""Checkpoints that pages show without saving them first (their set-up comments say so)."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path

import boto3
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from dcp_fsdp_osd import FlatModelState, FlatOptimSavePlanner, FlatOptimState, StreamingWriter
from dcp_fsdp_osd.layout.geometry import Box
from dcp_fsdp_osd.tools import Checkpoint, compare

__all__ = ["check_resumed", "layers", "make_run", "put_on_s3", "trained"]


def make_run(folder: Path = Path()) -> None:
    """``run``, of five steps, the last not committed; ``stock`` and ``bad``, of the fourth.

    By one rank.  ``bad`` has an altered byte and an orphan.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 400), nn.Linear(400, 7))
    optim = torch.optim.AdamW(model.parameters())
    state = {"model": FlatModelState(model), "optim": FlatOptimState(model, optim), "step": 0}
    run = folder / "run"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP warns that there is no process group
        for step in range(1000, 3500, 500):
            model(torch.randn(8, 300)).square().sum().backward()
            optim.step()
            state["step"] = step
            writers = [StreamingWriter(run / f"step-{step}")]
            if step == 2500:
                writers.append(FileSystemWriter(folder / "stock"))
            for writer in writers:
                dcp.save(state, storage_writer=writer, planner=FlatOptimSavePlanner())
    (run / "step-3000" / ".metadata").unlink()
    (data,) = (run / "step-3000").glob("*.distcp")
    data.write_bytes(data.read_bytes()[:300_000])
    shutil.copytree(run / "step-2500", folder / "bad")
    (data,) = (folder / "bad").glob("*.distcp")
    content = bytearray(data.read_bytes())
    content[700_000] ^= 4
    data.write_bytes(content)
    (folder / "bad" / "__9_0.distcp").write_bytes(b"x")


def check_resumed(run: Path) -> None:
    """After the README's example ran twice: the second time it went on with the first's state."""
    with Checkpoint(run / "step-5") as first, Checkpoint(run / "step-10") as second:
        assert second.read_box("optim.state.weight.step", Box((), ())).item() == 10
        # Five steps of AdamW move a weight by some 5e-3; new weights are 0.1 from the old ones.
        assert not compare(first, second, ["model.*"], atol=0.02).differences
        assert compare(first, second, ["model.*"]).differences


def layers() -> nn.Module:
    """What :func:`trained` wraps."""
    return nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 5))


def trained(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small model under FSDP1, and its AdamW, after a step on every rank."""
    torch.manual_seed(seed)
    model = FSDP(layers(), device_id=torch.device("cpu"), use_orig_params=True)
    optim = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 20)).square().sum().backward()
    optim.step()
    optim.zero_grad()
    return model, optim


def put_on_s3(url: str, *folders: str) -> None:
    """The files in some folders as objects below `url`, on the server of the environment."""
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    client = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])
    for folder in folders:
        for file in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
            client.put_object(Bucket=bucket, Key=f"{prefix}{file}", Body=file.read_bytes())
