"""``plan`` and ``doctor``: what is foretold is what happens."""

from __future__ import annotations

import pickle
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_fsdp_osd.errors import StorageError
from dcp_fsdp_osd.layout import simulate, units_of
from dcp_fsdp_osd.layout.geometry import Box
from dcp_fsdp_osd.storage.metadata import (
    KIND_TENSOR,
    EntryInfo,
    dump_metadata,
    fill_metadata,
)
from dcp_fsdp_osd.storage.reader import StreamingReader
from dcp_fsdp_osd.tools import Checkpoint, diagnose, forecast
from dcp_fsdp_osd.tools.opened import Want
from dcp_fsdp_osd.tools.reads import requests_of
from dcp_fsdp_osd.tools.sharding import wrapped_modules
from tests.servers import EmbeddedS3
from tests.storage.fakes import Script
from tests.tools.made import KINDS, broken, options, run, run_json, save, upload

pytestmark = pytest.mark.filterwarnings("ignore")  # DCP warns that there is no process group


# ---------------------------------------------------------------- plan


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Blocks of layers, of which ranks hold parts; ours and stock's."""
    folder = tmp_path_factory.mktemp("blocks")
    weights = {
        f"layers.{n}.{name}.weight": torch.randn(rows, 96)
        for n in range(4)
        for name, rows in (("q", 96), ("up", 200))
    }
    moments = {
        fqn: {"exp_avg": torch.randn(each.shape), "step": torch.tensor(1.0)}
        for fqn, each in {**weights, "head": torch.randn(70, 30)}.items()
    }
    value = {"model": {**weights, "head": torch.randn(70, 30)}, "optim": {"state": moments}}
    for kind in KINDS:
        save(value, folder / kind, kind)
    return folder


@pytest.mark.parametrize("world_size", [1, 3, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_plan_is_what_a_load_does(blocks: Path, kind: str, world_size: int) -> None:
    """Against a load of rank after rank, whose reader counts."""
    with Checkpoint(blocks / kind) as checkpoint:
        told = forecast(checkpoint, world_size)
        shapes = {
            key.removeprefix("model."): checkpoint.shape(key)
            for key in checkpoint.tensors
            if key.startswith("model.")
        }
    assert told.units == 5 and len(told.ranks) == world_size
    wrapped = ("", *(f"layers.{n}" for n in range(4)))
    units, outside = units_of(shapes, wrapped)
    held = 0
    for rank in range(world_size):
        layout = simulate(units, outside, world_size=world_size, rank=rank)
        wants = {}
        for param in layout.params:
            if world_size == 1:
                (fqn,), (shape,) = param.fqns, param.shapes
                whole = Box((0,) * len(shape), shape)
                wants[f"model.{fqn}", 0] = wants[f"optim.state.{fqn}.exp_avg", 0] = whole
            for segment in param.segments:
                for number, piece in enumerate(segment.pieces()):
                    for key in (f"model.{segment.fqn}", f"optim.state.{segment.fqn}.exp_avg"):
                        if piece.box.numel:
                            wants[key, number] = piece.box
        with Checkpoint(blocks / kind) as checkpoint:
            reader = checkpoint._reader
            before = reader.stats.bytes
            checkpoint.read(
                [Want(key, box, torch.empty(box.sizes)) for (key, _), box in wants.items()]
            )
            read = reader.stats.bytes - before
        mine = told.ranks[rank]
        assert mine.needed == 4 * sum(box.numel for box in wants.values())
        assert mine.nbytes == pytest.approx(read, rel=0.02, abs=4096)
        held += mine.needed
    assert held == 2 * 4 * sum(torch.Size(shape).numel() for shape in shapes.values())
    assert told.shared_entries == 9 and told.shared_nbytes == 36


def test_rows_of_fsdp2(blocks: Path) -> None:
    with Checkpoint(blocks / "ours") as checkpoint:
        told = forecast(checkpoint, 300, layout="fsdp2", all_ranks=True)
        total = sum(checkpoint.nbytes(key) for key in checkpoint.tensors) - told.shared_nbytes
    assert sum(each.needed for each in told.ranks) == total
    assert told.ranks[0].needed == 2 * 4 * (8 * 96 + 30) and told.ranks[-1].needed == 0
    assert [each.rank for each in told.ranks] == list(range(300))


def test_units_are_found_by_pattern() -> None:
    fqns = ["emb.weight", "layers.0.q.weight", "layers.1.experts.0.up", "layers.1.norm", "head.w"]
    assert wrapped_modules(fqns, None) == ["layers.0", "layers.1"]
    assert wrapped_modules(fqns, ["layers.*", "head"]) == ["layers.0", "layers.1", "head"]
    assert wrapped_modules(fqns, ["layers.*.experts.*"]) == ["layers.1.experts.0"]
    assert wrapped_modules(fqns, [""]) == []
    with pytest.raises(ValueError, match="no module"):
        wrapped_modules(fqns, ["blocks.*"])


def test_time_is_that_of_bandwidth_and_latency(blocks: Path) -> None:
    size = (blocks / "ours" / ".metadata").stat().st_size
    told = run_json(
        "plan", blocks / "ours", "--world-size", 2, "--bandwidth", "10MB/s", "--latency", "100ms"
    )
    for rank in told["ranks"]:
        waits = 1 + -(-rank["requests"] // 16)
        assert rank["seconds"] == pytest.approx(0.1 * waits + (size + rank["nbytes"]) / 1e7)
    assert told["seconds"] == max(rank["seconds"] for rank in told["ranks"])
    assert "slowest rank" in run("plan", blocks / "stock", "--world-size", 2).output


def test_plan_says_what_is_wrong(blocks: Path, tmp_path: Path) -> None:
    for arguments in (
        (),
        ("--world-size", 0),
        ("--world-size", 2, "--bandwidth", "fast"),
        ("--world-size", 2, "--bandwidth", "0"),
        ("--world-size", 2, "--latency", "1 h"),
        ("--world-size", 2, "--layout", "ddp"),
        ("--world-size", 2, "--wrap", "blocks.*"),
    ):
        result = run("plan", blocks / "ours", *arguments)
        assert result.exit_code == 2 and "Traceback" not in result.output, arguments
    save({"step": 1}, tmp_path / "none")
    with Checkpoint(tmp_path / "none") as none, pytest.raises(StorageError, match="no tensor"):
        forecast(none, 2)
    path = broken(blocks / "ours", tmp_path / "broken", "lost")
    assert run("plan", path, "--world-size", 2).exit_code == 0  # of which it reads no byte


def write_large(path: Path, *, layers: int, ranks: int, ours: bool = False) -> None:
    """The metadata of a model that was saved by `ranks` ranks, each block cut into their rows; as
    stock's writer leaves them, or ours."""
    stored: dict[str, Any] = {}
    entries: dict[Any, Any] = {}
    paths: dict[str, tuple[str, ...]] = {}
    ends = [0] * ranks
    for n in range(layers):
        for name, shape in (("q", (8192, 8192)), ("up", (28672, 8192)), ("down", (8192, 28672))):
            fqn = f"layers.{n}.{name}.weight"
            for where in (("model", fqn), ("optim", "state", fqn, "exp_avg")):
                key = ".".join(where)
                paths[key] = where
                rows = shape[0] // ranks
                chunks = []
                for rank in range(ranks):
                    offsets, sizes = torch.Size((rows * rank, 0)), torch.Size((rows, shape[1]))
                    chunks.append(ChunkStorageMetadata(offsets, sizes))
                    length = rows * shape[1] * 4 + 2048
                    index = MetadataIndex(key, offsets)
                    entries[index] = _StorageInfo(f"__{rank}_0.distcp", ends[rank], length)
                    ends[rank] += length
                properties = TensorProperties(dtype=torch.float32)
                stored[key] = TensorStorageMetadata(properties, torch.Size(shape), chunks)
    metadata = Metadata(stored, planner_data=paths, storage_data=entries)
    if ours:
        found = []
        for index, info in entries.items():
            name, begin, length = info.relative_path, info.offset, info.length
            nbytes = length - 2048
            entry = EntryInfo(name, begin, length, KIND_TENSOR, 7, 704, nbytes, "float32")
            found.append((index, entry))
        fill_metadata(metadata, found, "crc32c")
    path.mkdir()
    (path / ".metadata").write_bytes(dump_metadata(metadata) if ours else pickle.dumps(metadata))


def test_thousands_of_ranks(tmp_path: Path) -> None:
    """No data file is there at all; bounded in time."""
    write_large(tmp_path / "large", layers=16, ranks=64)
    begin = time.process_time()
    told = run_json("plan", tmp_path / "large", "--world-size", 4096)
    assert time.process_time() - begin < 30
    assert told["units"] == 16 and len(told["ranks"]) == 64
    total = 16 * 2 * 4 * (8192 * 8192 + 2 * 28672 * 8192)
    assert told["total_nbytes"] == pytest.approx(total, rel=0.02)
    assert told["ranks"][-1]["rank"] == 4095


def test_of_metadata_with_an_index_ranks_read_that(tmp_path: Path) -> None:
    """And the plan is the same as by all of the file."""
    write_large(tmp_path / "large", layers=8, ranks=256, ours=True)
    size = (tmp_path / "large" / ".metadata").stat().st_size
    with Checkpoint(tmp_path / "large") as checkpoint:
        told = forecast(checkpoint, 4096)
        (first, *_) = requests_of(checkpoint, 4096, 7)
    reader = StreamingReader(tmp_path / "large")
    reader.read_metadata()
    assert told.metadata_nbytes == reader.stats.bytes < size / 10
    assert told.metadata_file_nbytes == size
    assert (first.nbytes, first.offset) == (reader.stats.bytes, size - reader.stats.bytes)
    with Checkpoint(tmp_path / "large", allow_pickle=True) as checkpoint:  # which takes it whole
        whole = forecast(checkpoint, 4096)
    assert whole.metadata_nbytes == size
    for mine, other in zip(told.ranks, whole.ranks, strict=True):
        assert replace(mine, seconds=0) == replace(other, seconds=0)
        more = (size - told.metadata_nbytes) / 1e9
        assert other.seconds - mine.seconds == pytest.approx(more)
    output = run("plan", tmp_path / "large", "--world-size", 8).output
    assert "stock's readers" in output


# ---------------------------------------------------------------- doctor


def test_doctor_tries_a_folder_and_leaves_nothing(tmp_path: Path) -> None:
    found = run_json("doctor", tmp_path / "not" / "yet")
    assert (found["ok"], found["backend"], found["url"]) == (True, "local", str(tmp_path))
    names = [each["name"] for each in found["probes"]]
    assert {"conditional put", "range", "write in parts", "delete", "nothing is left"} <= {*names}
    assert all(each["ok"] for each in found["probes"])
    assert not list(tmp_path.iterdir())
    assert "it is a path" in run("doctor", tmp_path).output


@pytest.mark.parametrize("broken_call", ["put", "create", "read", "delete", "list"])
def test_doctor_tells_what_fails(tmp_path: Path, broken_call: str) -> None:
    def deny(operation: str, name: str) -> None:
        if operation == broken_call:
            raise PermissionError("that is not allowed")

    found = diagnose(tmp_path, backend=Script(deny).store)
    failed = {each.name for each in found.probes if each.ok is False}
    expected = {
        "put": {"write"},
        "create": {"write in parts"},
        "read": {"range"},
        "delete": {"delete", "nothing is left"},
        "list": {"list what was written"},
    }
    assert failed == expected[broken_call] and not found.ok
    assert all("not allowed" in each.said for each in found.probes if each.name == min(failed))
    assert bool(list(tmp_path.iterdir())) == (broken_call == "delete")


def test_doctor_and_plan_on_s3(
    s3: EmbeddedS3, blocks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = options(s3)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    result = run("doctor", s3.url("doctor"), *args)
    assert result.exit_code == 0, result.output
    assert "in the storage options" in result.output and "AWS_MAX_ATTEMPTS" in result.output
    assert s3.secret_key not in result.output and "secret" in result.output
    client = boto3.client("s3", **s3.boto3_options)
    assert not client.list_objects_v2(Bucket=s3.bucket, Prefix="doctor").get("Contents")
    result = run("doctor", "s3://absent-bucket/x", *args)
    assert result.exit_code == 1 and "FAILED" in result.output
    url = upload(blocks / "ours", s3, "blocks")
    assert run_json("plan", url, "--world-size", 2, *args)["units"] == 5
