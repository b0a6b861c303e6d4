"""What ``dcp.save`` returns on every rank is DCP's own metadata, though most never read them."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from dcp_fsdp_osd import FlatOptimSavePlanner, StreamingReader, StreamingWriter
from tests.ranks import run_ranks


class Changing(StreamingWriter):
    """Adds something of its own to the metadata once they are written."""

    def finish(self, metadata: Metadata, results: Any) -> None:
        super().finish(metadata, results)
        metadata.planner_data = {**metadata.planner_data, "own": ("own",)}


def _state() -> dict[str, Any]:
    return {"a": torch.arange(6.0), "b": {"c": 1, "d": torch.ones(2, 3)}, "step": 3}


def _settled(metadata: Metadata) -> Metadata:
    """Without the strides that torch 2.15 has of tensors, and that are not written."""
    for each in metadata.state_dict_metadata.values():
        properties = getattr(each, "properties", None)
        if hasattr(properties, "strides"):
            properties.strides = None
    return metadata


def _fields(metadata: Metadata) -> dict[str, Any]:
    fields = dict(vars(metadata))
    fields["storage_data"] = {
        index: {name: value for name, value in vars(info).items() if value is not None}
        for index, info in fields["storage_data"].items()
    }
    return fields


def _every_rank(rank: int, world: int, folder: str) -> None:
    planner = FlatOptimSavePlanner()
    for number in range(2):
        path = f"{folder}/{number}"
        found = dcp.save(_state(), storage_writer=StreamingWriter(path), planner=planner)
        assert isinstance(found, Metadata)
        written = pickle.loads(Path(path, ".metadata").read_bytes())
        written.__dict__["dcp_fsdp_osd"].pop("index", None)
        assert _fields(_settled(found)) == _fields(written)
        assert found == written or rank == 0  # whose entries are a mapping of ours
        assert type(found) is Metadata
        assert type(pickle.loads(pickle.dumps(found))) is Metadata
        assert b"returned" not in pickle.dumps(found)
    changing = Changing(f"{folder}/changing")
    found = dcp.save(_state(), storage_writer=changing, planner=planner)
    assert found.planner_data["own"] == ("own",)


def test_every_rank_is_given_the_metadata(tmp_path: Path) -> None:
    run_ranks(_every_rank, 2, str(tmp_path))
    StreamingReader(tmp_path / "1").read_metadata()


USES: dict[str, Any] = {
    "an attribute": lambda found: found.state_dict_metadata,
    "one with a default": lambda found: found.storage_data,
    "vars": lambda found: vars(found)["planner_data"],
    "repr": repr,
    "equality": lambda found: found == Metadata({}),
    "equality from the other side": lambda found: Metadata({}) == found,
    "replace": lambda found: dataclasses.replace(found, planner_data=None),
    "asdict": lambda found: dataclasses.fields(found) and found.version,
    "pickle": pickle.dumps,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "set": lambda found: setattr(found, "version", "1.0.0"),
    "an attribute that it has not": lambda found: getattr(found, "nothing", None),
}


def _sent() -> tuple[Metadata, Metadata]:
    """On the coordinator, and as another rank gets it."""
    from dcp_fsdp_osd.storage.metadata import dump_metadata
    from dcp_fsdp_osd.storage.returned import send_as

    planner = FlatOptimSavePlanner()
    planner.set_up_planner(_state(), None, True)
    _, metadata = planner.create_global_plan([planner.create_local_plan()])
    metadata.version = "1.0.0"
    metadata.storage_data = {}
    send_as(_settled(metadata), dump_metadata(metadata))
    return metadata, pickle.loads(pickle.dumps(metadata))


@pytest.mark.parametrize("use", USES)
def test_whatever_is_done_first(use: str) -> None:
    kept, found = _sent()
    assert isinstance(found, Metadata) and not isinstance(found, dict)
    assert type(found) is not Metadata  # nothing was read yet
    made = USES[use](found)
    assert type(found) is Metadata
    assert found == kept
    assert vars(found).keys() == vars(kept).keys()
    if use in ("copy", "deepcopy"):
        assert type(made) is Metadata and made == kept
    if use == "pickle":
        assert pickle.loads(made) == kept


def test_what_is_changed_before_it_is_sent() -> None:
    from dcp_fsdp_osd.storage.returned import send_as

    metadata = Metadata({}, planner_data={"a": ("a",)})
    send_as(metadata, pickle.dumps(metadata))
    metadata.planner_data = {"b": ("b",)}
    assert pickle.loads(pickle.dumps(metadata)).planner_data == {"b": ("b",)}
    assert type(metadata) is Metadata
    assert pickle.loads(pickle.dumps(metadata)) == metadata  # and again


def test_threads_that_look_at_once() -> None:
    for _ in range(50):
        kept, found = _sent()
        barrier = threading.Barrier(4)
        seen: list[Any] = []

        def look(found: Metadata = found, barrier: Any = barrier, seen: list[Any] = seen) -> None:
            barrier.wait()
            seen.append(found.planner_data)

        threads = [threading.Thread(target=look) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert seen == [kept.planner_data] * 4
