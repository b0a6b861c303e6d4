"""What the tests of the tools share: small checkpoints, ways to break them, and commands run."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import boto3
import torch
import torch.distributed.checkpoint as dcp
from click.testing import Result
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from typer.testing import CliRunner

from dcp_fsdp_osd import FlatModelState, FlatOptimSavePlanner, FlatOptimState, StreamingWriter
from dcp_fsdp_osd.cli.app import app
from tests.servers import S3Endpoint

ROWS, COLUMNS = 96, 71
KINDS = ("ours", "stock")


def run(*arguments: object) -> Result:
    """``dcp-osd`` with these arguments."""
    return CliRunner().invoke(app, [str(each) for each in arguments])


def run_json(*arguments: object, status: int = 0) -> Any:
    """What it prints with ``--json``, after a look at its exit status."""
    result = run(*arguments, "--json")
    assert result.exit_code == status, (result.output, result.exception)
    return json.loads(result.stdout)


def state(seed: int = 0) -> dict[str, Any]:
    """Weights and optimizer of a tiny model after a step, and what else a loop saves."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(COLUMNS, ROWS), nn.Linear(ROWS, 3))
    optim = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, COLUMNS)).sum().backward()
    optim.step()
    return {"model": FlatModelState(model), "optim": FlatOptimState(model, optim), "step": 7}


def save(value: dict[str, Any], path: str | Path, kind: str = "ours", **options: Any) -> None:
    """As our writer or stock DCP's leaves it."""
    writer = FileSystemWriter(path) if kind == "stock" else StreamingWriter(path, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP warns that there is no process group
        dcp.save(value, storage_writer=writer, planner=FlatOptimSavePlanner())


def data_file(path: Path) -> Path:
    """The one data file of a checkpoint."""
    (found,) = path.glob("*.distcp")
    return found


def flip(path: Path, at: int) -> None:
    """Turn one bit of a file around."""
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 4]))


def _flip_payload(path: Path) -> None:
    """In the middle of the largest tensor, which the matrix of the first layer is."""
    file = data_file(path)
    flip(file, _offset_of_matrix(path))


def _offset_of_matrix(path: Path) -> int:
    from dcp_fsdp_osd.tools.describe import entry_infos
    from dcp_fsdp_osd.tools.opened import Checkpoint

    with Checkpoint(path) as checkpoint:
        infos = {index.fqn: info for index, info in entry_infos(checkpoint)}
    info = infos["model.0.weight"]
    return info.offset + info.length // 2


def _flip_metadata(path: Path) -> None:
    """In the name of a tensor, which the seal of ours covers; stock's, without one, are cut."""
    file = path / ".metadata"
    data = file.read_bytes()
    if b"DCPOSD1" in data[-20:]:
        flip(file, data.index(b"model.0.weight") + 3)
    else:
        os.truncate(file, len(data) - 40)


def _cut(path: Path) -> None:
    file = data_file(path)
    os.truncate(file, file.stat().st_size - 100)


def _lose(path: Path) -> None:
    data_file(path).unlink()


def _add(path: Path) -> None:
    (path / "__5_0.distcp").write_bytes(b"left over")


def _append(path: Path) -> None:
    with data_file(path).open("ab") as file:
        file.write(b"more")


BREAKS: dict[str, Callable[[Path], None]] = {
    "payload": _flip_payload,
    "metadata": _flip_metadata,
    "cut": _cut,
    "lost": _lose,
    "orphan": _add,
    "longer": _append,
}


def broken(source: Path, target: Path, how: str) -> Path:
    """A copy of a checkpoint, broken."""
    shutil.copytree(source, target)
    BREAKS[how](target)
    return target


def upload(source: Path, endpoint: S3Endpoint, name: str) -> str:
    """The files below a folder, as objects; the URL of the folder."""
    client = boto3.client("s3", **endpoint.boto3_options)
    for file in sorted(source.rglob("*")):
        if file.is_file():
            key = f"{name}/{file.relative_to(source)}"
            client.put_object(Bucket=endpoint.bucket, Key=key, Body=file.read_bytes())
    return endpoint.url(name)


def options(endpoint: S3Endpoint) -> list[str]:
    """The options of commands for a server."""
    found = {
        "endpoint_url": endpoint.endpoint_url,
        "key": endpoint.access_key,
        "secret": endpoint.secret_key,
        "region": endpoint.region,
    }
    return [text for name, value in found.items() for text in ("-o", f"{name}={value}")]
