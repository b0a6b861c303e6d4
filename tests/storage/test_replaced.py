"""Metadata that are replaced while they are read, altered by a bit, or mostly a hole in a file."""

from __future__ import annotations

import pickle
import time
import tracemalloc
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_fsdp_osd.errors import CorruptCheckpointError, StorageError
from dcp_fsdp_osd.storage import StreamingReader
from dcp_fsdp_osd.storage.metadata import load_metadata
from tests.cpu_time import cpu_seconds
from tests.storage.conftest import Place
from tests.storage.fuzz_metadata import read
from tests.storage.states import BoxPlanner, load

pytestmark = pytest.mark.filterwarnings("ignore")  # DCP warns that there is no process group

STATE = {"w": torch.arange(6000.0).view(20, 300)}


class Interrupted(BoxPlanner):
    """Something happens between the metadata and the data."""

    happens: Any = None

    def finish_plan(self, central_plan: Any) -> Any:
        self.happens()
        return central_plan


def failure(place: Place, happens: Any) -> BaseException:
    planner = Interrupted("w", [((0, 0), (20, 300))])
    planner.happens = happens
    with pytest.raises(CheckpointException) as error:
        dcp.load({}, storage_reader=place.reader(), planner=planner)
    assert [type(each) for each in planner.errors] == [type(cause(error))]
    return cause(error)


def cause(error: pytest.ExceptionInfo[CheckpointException]) -> BaseException:
    ((found, _),) = error.value.failures.values()
    return found


def test_replaced_while_it_is_read(place: Place) -> None:
    dcp.save(dict(STATE), storage_writer=place.writer())
    other = {"w": STATE["w"] + 1}
    found = failure(
        place, lambda: dcp.save(dict(other), storage_writer=place.writer(overwrite=True))
    )
    assert type(found) is StorageError
    assert "was replaced or deleted while it was read: its .metadata is another one" in str(found)
    assert "the file is missing" in str(found)


def test_deleted_while_it_is_read_and_truly_corrupt(tmp_path: Path) -> None:
    place = Place("local", str(tmp_path / "c"), "auto")
    dcp.save(dict(STATE), storage_writer=place.writer())

    def deleted() -> None:
        for path in (tmp_path / "c").iterdir():
            path.unlink()

    assert "its .metadata is gone" in str(failure(place, deleted))
    dcp.save(dict(STATE), storage_writer=place.writer())

    def lost() -> None:
        for path in (tmp_path / "c").glob("*.distcp"):
            path.unlink()

    found = failure(place, lost)
    assert type(found) is CorruptCheckpointError and "replaced" not in str(found)


HOLES = {
    "nothing but a hole": (b"", b""),
    "a head and a hole": (b"\x80\x04\x95", b""),
    "a hole and an end": (b"", b"."),
    "a head, a hole, and somebody's seal": (b"\x80\x04", b"\nDCPOSD1" + bytes(12)),
}


@pytest.mark.parametrize("ends", HOLES.values(), ids=HOLES)
def test_a_sparse_file_is_refused_unread(tmp_path: Path, ends: tuple[bytes, bytes]) -> None:
    dcp.save(dict(STATE), storage_writer=FileSystemWriter(tmp_path))
    with (tmp_path / ".metadata").open("wb") as file:
        file.write(ends[0])
        file.truncate((700 << 20) - len(ends[1]))
        file.seek(0, 2)
        file.write(ends[1])

    def refused() -> None:
        with pytest.raises(CheckpointException, match=r"734003200 bytes that begin with"):
            load(StreamingReader(tmp_path), STATE)

    tracemalloc.start()
    try:
        refused()
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert cpu_seconds(refused) < 1.0


def stock_metadata(entries: int) -> bytes:
    """As stock writes it for a tensor of as many chunks."""
    stored, infos = {}, {}
    for number in range(entries // 50):
        fqn = f"model.layers.{number}.weight"
        chunks = [
            ChunkStorageMetadata(torch.Size((row, 0)), torch.Size((1, 64))) for row in range(50)
        ]
        stored[fqn] = TensorStorageMetadata(
            TensorProperties(torch.float32), torch.Size((50, 64)), chunks
        )
        for row in range(50):
            infos[MetadataIndex(fqn, torch.Size((row, 0)), row)] = _StorageInfo(
                f"__{row}_0.distcp", number * 2000, 2000
            )
    return pickle.dumps(Metadata(stored, planner_data={"a": ("a",)}, storage_data=infos))


def test_a_flipped_bit_costs_less_than_a_second() -> None:
    """Of metadata without a seal, so that each flip reaches the interpreter and the checks."""
    whole = stock_metadata(400)
    load_metadata(whole, "test")
    generator = torch.Generator().manual_seed(5)
    places = torch.randint(0, 8 * len(whole), (150,), generator=generator).tolist()
    # The first entries name the classes, and make what all others refer to.
    places += range(0, 8 * 1200, 97)
    for place in places:
        data = bytearray(whole)
        data[place // 8] ^= 1 << place % 8
        begin = time.thread_time()
        read(bytes(data))
        if time.thread_time() - begin >= 0.5:
            assert cpu_seconds(partial(read, bytes(data))) < 1.0, f"bit {place}"
