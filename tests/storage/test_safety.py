"""Checkpoints that lie: altered, cut off, hostile.  An error names the place, and no code runs."""

from __future__ import annotations

import collections
import copyreg
import datetime
import decimal
import io
import itertools
import pathlib
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_fsdp_osd.errors import CorruptCheckpointError, FlatOptimError, UnsafeCheckpointError
from dcp_fsdp_osd.storage import StreamingReader, StreamingWriter
from dcp_fsdp_osd.storage.metadata import dump_metadata, load_metadata
from tests.storage.states import BoxPlanner, assert_same, load

pytestmark = pytest.mark.filterwarnings("ignore")  # DCP warns that there is no process group

STATE = {"weight": torch.arange(30_000.0).view(100, 300), "step": torch.tensor(3.0), "lr": 0.5}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    dcp.save(dict(STATE), storage_writer=StreamingWriter(tmp_path / "c", fsync=False))
    return tmp_path / "c"


def cause(error: pytest.ExceptionInfo[CheckpointException]) -> BaseException:
    (failure,) = error.value.failures.values()
    return failure[0]


def edit(path: Path, change: Any) -> None:
    """Change the metadata and seal it again, as an attacker would."""
    data = (path / ".metadata").read_bytes()
    metadata = load_metadata(data, "test")
    change(metadata)
    (path / ".metadata").write_bytes(dump_metadata(metadata))


def entry(metadata: Metadata, fqn: str) -> _StorageInfo:
    return next(info for index, info in metadata.storage_data.items() if index.fqn == fqn)


def test_flipping_any_bit_of_the_metadata_raises(saved: Path) -> None:
    data = bytearray((saved / ".metadata").read_bytes())
    for position in range(len(data)):
        for bit in (1, 128):
            data[position] ^= bit
            with pytest.raises(FlatOptimError):
                load_metadata(bytes(data), "test")
            data[position] ^= bit
    load_metadata(bytes(data), "test")


def test_cutting_the_metadata_anywhere_raises(saved: Path) -> None:
    data = (saved / ".metadata").read_bytes()
    for size in range(len(data)):
        with pytest.raises(CorruptCheckpointError):
            load_metadata(data[:size], "test")
    with pytest.raises(CorruptCheckpointError):
        load_metadata(data + b"x", "test")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(st.binary(max_size=300))
def test_any_bytes_as_metadata_raise(data: bytes) -> None:
    with pytest.raises(FlatOptimError):
        load_metadata(data, "test")


@pytest.mark.parametrize(
    "name",
    ["os.system", "builtins.eval", "builtins.getattr", "torch.load", "torch.hub.load",
     "torch._utils._rebuild_tensor_v2", "torch.serialization.load", "pathlib.Path",
     "torch.distributed.checkpoint.metadata.Enum", "collections.defaultdict", "subprocess.Popen"],
)  # fmt: skip
def test_other_classes_in_the_metadata(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    for pickled in (
        f"c{module}\n{attribute}\n.".encode(),
        b"\x80\x04" + b"".join(b"\x8c" + bytes([len(t)]) + t.encode() for t in (module, attribute))
        + b"\x93.",
    ):  # fmt: skip
        with pytest.raises(UnsafeCheckpointError, match=re.escape(name)):
            load_metadata(pickled, "here/.metadata")


def test_no_code_runs_from_metadata_or_byte_items(saved: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"

    class Touch:
        def __reduce__(self) -> Any:
            return (pathlib.Path.touch, (marker,))

    byte_item = io.BytesIO()
    torch.save({"x": Touch()}, byte_item)

    class Planner(dcp.DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            return byte_item if write_item.index.fqn == "lr" else super().resolve_data(write_item)

    dcp.save(dict(STATE), storage_writer=StreamingWriter(tmp_path / "e"), planner=Planner())
    with pytest.raises(CheckpointException) as error:
        load(StreamingReader(tmp_path / "e"), STATE)
    assert isinstance(cause(error), UnsafeCheckpointError) and "lr" in str(cause(error))
    assert not marker.exists()
    edit(saved, lambda metadata: setattr(metadata, "planner_data", Touch()))
    with pytest.raises(CheckpointException, match="pathlib"):
        load(StreamingReader(saved), STATE)
    assert not marker.exists()
    load(StreamingReader(saved, allow_pickle=True), STATE)
    assert marker.exists()


@pytest.mark.parametrize(
    "content",
    [datetime.timedelta(1), slice(1, 2), pathlib.PurePosixPath("x"), decimal.Decimal(1)],
    ids=["timedelta", "slice", "path", "decimal"],
)
def test_byte_items_by_their_class(tmp_path: Path, content: Any) -> None:
    dcp.save({"x": content}, storage_writer=StreamingWriter(tmp_path / "c"))
    state = {"x": None}
    with pytest.raises(CheckpointException, match=type(content).__name__):
        dcp.load(state, storage_reader=StreamingReader(tmp_path / "c"))
    state = {"x": None}
    dcp.load(state, storage_reader=StreamingReader(tmp_path / "c", allow_pickle=True))
    assert type(state["x"]) is type(content)


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "a/../../b", "s3://bucket/key"])
def test_paths_that_leave_the_checkpoint(saved: Path, name: str) -> None:
    edit(saved, lambda metadata: setattr(entry(metadata, "weight"), "relative_path", name))
    with pytest.raises(CheckpointException) as error:
        load(StreamingReader(saved), STATE)
    assert isinstance(cause(error), UnsafeCheckpointError) and name in str(cause(error))


@pytest.mark.parametrize(
    ("field", "value"),
    [("offset", -1), ("offset", 1 << 70), ("offset", "0"), ("offset", None), ("length", -5),
     ("length", 1 << 61), ("length", 10), ("offset", 1 << 50), ("length", 2.5), ("offset", True),
     ("dcp_fsdp_osd", 5), ("dcp_fsdp_osd", (1, 2)), ("dcp_fsdp_osd", (9, 0)),
     ("dcp_fsdp_osd", (1, 0, 256, 1 << 60, "float32")), ("dcp_fsdp_osd", (1, 0, 256, 8, "float32")),
     ("dcp_fsdp_osd", (1, 0, 256, 120000, "object")),
     ("dcp_fsdp_osd", (1, 0, 300, 120000, "float32")),
     ("transform_descriptors", ["zstd"])],
)  # fmt: skip
def test_entries_that_cannot_be(saved: Path, field: str, value: Any) -> None:
    edit(saved, lambda metadata: vars(entry(metadata, "weight")).update({field: value}))
    with pytest.raises(CheckpointException) as error:
        load(StreamingReader(saved), STATE)
    assert isinstance(cause(error), CorruptCheckpointError), cause(error)
    assert "weight" in str(cause(error))


def test_sizes_are_checked_before_memory_is_taken(saved: Path) -> None:
    for fqn, text in (("weight", "are no envelope"), ("lr", "has only")):
        length = entry(load_metadata((saved / ".metadata").read_bytes(), "test"), fqn).length
        edit(saved, lambda metadata, fqn=fqn: setattr(entry(metadata, fqn), "length", 1 << 50))
        reader = StreamingReader(saved)
        with pytest.raises(CheckpointException, match=text):
            load(reader, STATE)
        assert reader.stats.peak_inflight == 0
        edit(saved, lambda m, fqn=fqn, n=length: setattr(entry(m, fqn), "length", n))


def test_chunks_that_cannot_be(saved: Path) -> None:
    def change(metadata: Metadata) -> None:
        stored = metadata.state_dict_metadata["weight"]
        stored.size = stored.chunks[0].sizes = torch.Size([200, 300])

    edit(saved, change)
    planner = BoxPlanner("weight", [((0, 0), (200, 300))])
    with pytest.raises(CheckpointException, match="no tensor of shape"):
        dcp.load({}, storage_reader=StreamingReader(saved), planner=planner)
    assert planner.errors and not planner.committed


@pytest.mark.parametrize("where", ["header", "payload", "trailer", "scalar", "bytes"])
def test_what_an_altered_byte_says(saved: Path, where: str) -> None:
    metadata = load_metadata((saved / ".metadata").read_bytes(), "test")
    fqn = {"scalar": "step", "bytes": "lr"}.get(where, "weight")
    info = entry(metadata, fqn)
    at = info.offset + {"header": 40, "payload": 70_000, "scalar": 258, "bytes": 9}.get(
        where, info.length - 30
    )
    path = saved / info.relative_path
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)
    with pytest.raises(CheckpointException) as error:
        load(StreamingReader(saved), STATE)
    assert isinstance(cause(error), CorruptCheckpointError)
    for part in (info.relative_path, fqn, str(info.offset), "rank 0"):
        assert part in str(cause(error)), (part, str(cause(error)))
    if where in ("header", "payload", "trailer"):
        found = load(StreamingReader(saved, verify=False), STATE)  # unchecked, as asked for
        assert where != "payload" or not torch.equal(found["weight"], STATE["weight"])


def test_part_of_an_entry_is_checked_by_block(saved: Path) -> None:
    """A read of some rows notices what is altered in their blocks, and only there."""
    metadata = load_metadata((saved / ".metadata").read_bytes(), "test")
    info = entry(metadata, "weight")
    path = saved / info.relative_path
    data = bytearray(path.read_bytes())
    data[info.offset + info.dcp_fsdp_osd[2] + 60_000] ^= 1  # row 50, block 3 of 16 KiB
    path.write_bytes(data)
    with pytest.raises(CheckpointException, match="payload bytes 49152 to 65536"):
        dcp.load(
            {},
            storage_reader=StreamingReader(saved),
            planner=BoxPlanner("weight", [((49, 0), (2, 300))]),
        )
    planner = BoxPlanner("weight", [((60, 0), (40, 300))])
    dcp.load({}, storage_reader=StreamingReader(saved), planner=planner)
    assert torch.equal(planner.found[0], STATE["weight"][60:])


def test_missing_and_short_files(saved: Path) -> None:
    (path,) = saved.glob("*.distcp")
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointException, match="shorter than byte") as error:
        load(StreamingReader(saved), STATE)
    assert isinstance(cause(error), CorruptCheckpointError)
    path.unlink()
    with pytest.raises(CheckpointException, match="the file is missing"):
        load(StreamingReader(saved), STATE)
    (saved / ".metadata").unlink()
    with pytest.raises(CheckpointException, match="no checkpoint at"):
        load(StreamingReader(saved), STATE)


def test_another_rank_s_metadata_does_not_stand_in_for_a_broken_one(saved: Path) -> None:
    """DCP asks for `__0.metadata` when reading `.metadata` fails for whatever reason."""
    data = (saved / ".metadata").read_bytes()
    (saved / "__0.metadata").write_bytes(data)
    (saved / ".metadata").write_bytes(data[:-1])
    with pytest.raises(CheckpointException, match="altered or cut off"):
        load(StreamingReader(saved), STATE)


def test_a_checksum_that_cannot_be_computed_is_no_silent_pass(saved: Path) -> None:
    edit(saved, lambda metadata: metadata.dcp_fsdp_osd.update(checksum="xxh3"))
    with pytest.raises(CheckpointException, match="verify=False"):
        load(StreamingReader(saved), STATE)
    assert_same(load(StreamingReader(saved, verify=False), STATE), STATE)


def test_a_later_format_is_not_guessed_at(saved: Path) -> None:
    edit(saved, lambda metadata: metadata.dcp_fsdp_osd.update(format=2))
    with pytest.raises(CheckpointException, match="format is 2"):
        load(StreamingReader(saved), STATE)


def test_another_byte_order_is_not_ignored(saved: Path) -> None:
    edit(saved, lambda metadata: metadata.dcp_fsdp_osd.update(byteorder="big"))
    with pytest.raises(CheckpointException, match="byte order"):
        load(StreamingReader(saved), STATE)


def test_stock_metadata_of_all_kinds_is_allowed(tmp_path: Path) -> None:
    dcp.save(dict(STATE), storage_writer=FileSystemWriter(tmp_path / "c"))
    found = load_metadata((tmp_path / "c" / ".metadata").read_bytes(), "test")
    assert set(found.state_dict_metadata) == set(STATE)
    full = Metadata(
        {
            "t": TensorStorageMetadata(
                TensorProperties(torch.float8_e4m3fn),
                torch.Size([2, 3]),
                [ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2, 3]))],
            ),
            "b": BytesStorageMetadata(),
        },
        planner_data={"t": ("a", 0, "t"), "o": collections.OrderedDict(x={1, 2})},
        storage_data={MetadataIndex("t", torch.Size([0, 0]), 0): _StorageInfo("f", 0, 5)},
        storage_meta=StorageMeta(pathlib.PosixPath("/x/y"), "save", "load"),
    )
    # Of later torches than 2.6, whose metadata must be read by all.
    full.version = "1.0.0"
    full.storage_meta.modules = ["m"]
    for protocol, strides in itertools.product((2, 3, 4, 5), ([], [None], [(3, 1)], [(3, 1), 7])):
        again = load_metadata(_with_fields(full, protocol, strides), "test")
        assert again.state_dict_metadata.keys() == full.state_dict_metadata.keys()
        tensor, same = again.state_dict_metadata["t"], full.state_dict_metadata["t"]
        assert (tensor.size, tensor.chunks) == (same.size, same.chunks)
        fields = ("dtype", "layout", "requires_grad", "memory_format", "pin_memory")
        for field in fields:
            assert getattr(tensor.properties, field) == getattr(same.properties, field)
        assert again.storage_data == full.storage_data
        assert str(again.storage_meta.checkpoint_id) == "/x/y"


def _with_fields(metadata: Metadata, protocol: int, more: list[Any]) -> bytes:
    """As a torch pickles it that has ``more`` fields in TensorProperties: 2.15 has the strides."""

    def reduce(properties: TensorProperties) -> Any:
        return copyreg.__newobj__, (TensorProperties,), (*properties.__getstate__()[:5], *more)

    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol)
    pickler.dispatch_table = {**copyreg.dispatch_table, TensorProperties: reduce}
    pickler.dump(metadata)
    return buffer.getvalue()


def test_what_is_written_is_read_by_every_torch(saved: Path) -> None:
    """TensorProperties are pickled with the five fields that they have had since torch 2.4."""
    data = (saved / ".metadata").read_bytes()
    states = []

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            found = super().find_class(module, name)
            if name != "TensorProperties":
                return found
            return type(name, (), {"__setstate__": lambda self, state: states.append(state)})

    Unpickler(io.BytesIO(data)).load()
    assert states and all(len(state) == 5 for state in states)


def test_the_pickle_holds_no_class_of_ours(saved: Path) -> None:
    data = (saved / ".metadata").read_bytes()
    assert b"dcp_fsdp_osd." not in data
    pickle.loads(data)
