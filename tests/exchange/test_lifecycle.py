"""Loads one after another, failed ones among them, and when nothing is exchanged at all."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException

from dcp_fsdp_osd import FlatOptimLoadPlanner, StreamingReader
from dcp_fsdp_osd.errors import ExchangeError
from dcp_fsdp_osd.exchange.buffers import STAGING_BYTES, Staging, one_stretch, pack, unpack
from dcp_fsdp_osd.exchange.transport import Channels
from tests.exchange.jobs import whole, wrapped
from tests.planners.checks import assert_same, make, raw, save
from tests.ranks import run_ranks
from tests.torch_gaps import HAS_NO_DIST


class Failing(StreamingReader):
    """Fails on rank 0, which is the one that reads small things, as long as it is told to."""

    fails = True

    def _checksum(self, metadata: Any) -> Any:
        if self.fails and dist.get_rank() == 0:
            raise OSError("no such disk")
        return super()._checksum(metadata)


def _again(rank: int, world: int, path: str) -> None:
    """One planner and one reader for many loads, every other one of which fails."""
    model, optim = wrapped("ddp", world, steps=2)
    save(model, optim, path)
    expected = optim.state_dict()
    planner = FlatOptimLoadPlanner(model, optim, broadcast=True, stall_seconds=20)
    reader = Failing(path)
    held = []
    for turn in range(10):
        reader.fails = turn % 2 == 0
        state: dict[str, Any] = {"optim": {}}
        if reader.fails:
            with pytest.raises(CheckpointException, match="no such disk"):
                dcp.load(state, storage_reader=reader, planner=planner)
            assert state == {"optim": {}}, "on no rank is anything handed over"
        else:
            dcp.load(state, storage_reader=reader, planner=planner)
            assert_same(state["optim"], expected)
        if turn >= 3:
            held.append(
                tuple(len(list(Path(f"/proc/self/{what}").iterdir())) for what in ("fd", "task"))
            )
    files, threads = zip(*held, strict=True)
    assert max(files[-3:]) <= max(files[:3]) + 1, files
    assert max(threads[-3:]) <= max(threads[:3]) + 1, threads


def test_many_loads_with_one_planner(tmp_path: Path) -> None:
    """Nothing is left behind: no thread, no connection, no half of an earlier load."""
    run_ranks(_again, 3, str(tmp_path))


def _late_failure(rank: int, world: int, path: str) -> str:
    """Rank 1 has read everything and cannot put it to use: then no rank does."""

    class Late(FlatOptimLoadPlanner):
        def _take_object(self, item: Any, value: Any) -> None:
            if rank == 1:
                raise ValueError("cannot be understood")
            super()._take_object(item, value)

    model, optim = wrapped("ddp", world, steps=2)
    save(model, optim, path)
    planner = Late(model, optim, broadcast=True, stall_seconds=20)
    state: dict[str, Any] = {"optim": {}}
    with pytest.raises(CheckpointException) as caught:
        dcp.load(state, storage_reader=FileSystemReader(path), planner=planner)
    assert state == {"optim": {}}
    return str(caught.value)


def test_all_hand_over_or_none(tmp_path: Path) -> None:
    for text in run_ranks(_late_failure, 3, str(tmp_path)):
        assert "cannot be understood" in text
        assert "rank 1 failed" in text


class Remote(StreamingReader):
    """Says that a local path is a remote one."""

    def prepare_local_plan(self, plan: Any) -> Any:
        plan = super().prepare_local_plan(plan)
        data = {**plan.storage_data["dcp_fsdp_osd"], "remote": True}
        return dataclasses.replace(plan, storage_data={"dcp_fsdp_osd": data})


def _rule(rank: int, world: int, path: str) -> dict[str, bool]:
    model, optim = wrapped("ddp", world, steps=1)
    save(model, optim, path)
    found = {}
    for name, reader, setting in [
        ("local", StreamingReader, "auto"),
        ("stock", FileSystemReader, "auto"),
        ("small", Remote, "auto"),
        ("local, on", StreamingReader, True),
        ("off on one", StreamingReader, rank != 1),
        ("off", Remote, False),
    ]:
        planner = FlatOptimLoadPlanner(model, optim, broadcast=setting)
        dcp.load({"optim": {}}, storage_reader=reader(path), planner=planner)
        found[name] = planner.exchanged is not None
    if HAS_NO_DIST:
        planner = FlatOptimLoadPlanner(model, optim, broadcast=True)
        dcp.load({"optim": {}}, storage_reader=StreamingReader(path), planner=planner, no_dist=True)
        found["no_dist"] = planner.exchanged is not None
    return found


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_when_it_is_on(tmp_path: Path) -> None:
    """Above 8 MiB spared, from a remote store: see test_read_once."""
    for found in run_ranks(_rule, 2, str(tmp_path)):
        assert [name for name, on in found.items() if on] == ["local, on"]


def _alone(rank: int, world: int, path: str) -> None:
    model, optim = make(steps=2)
    save(model, optim, path)
    planner = FlatOptimLoadPlanner(model, optim, broadcast=True)
    state: dict[str, Any] = {"optim": {}}
    dcp.load(state, storage_reader=StreamingReader(path), planner=planner)
    assert planner.exchanged is None
    optim.load_state_dict(state["optim"])
    assert whole(model, optim)["state"]


def test_one_rank(tmp_path: Path) -> None:
    run_ranks(_alone, 1, str(tmp_path))


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.bfloat16, torch.bool])
def test_packing_at_any_byte(dtype: torch.dtype, layout: str) -> None:
    def values() -> list[torch.Tensor]:
        base = torch.arange(24).reshape(4, 6).to(dtype)
        view = {"contiguous": base, "transposed": base.t(), "strided": base[:, ::2]}[layout]
        return [torch.arange(5, dtype=torch.uint8), view, torch.tensor(3.5), view[1]]

    views = values()
    total = sum(view.nbytes for view in views)
    data = torch.zeros(total + 1, dtype=torch.uint8)[1:]
    pack(views, data)
    assert bytes(data.numpy()) == b"".join(raw(view) for view in views)
    fresh = [view.zero_() for view in values()]
    unpack(data, fresh)
    for got, expected in zip(fresh, views, strict=True):
        assert raw(got) == raw(expected)


def test_views_that_lie_one_behind_the_other_are_sent_as_they_are() -> None:
    memory = torch.arange(12.0)
    cpu = torch.device("cpu")
    found = one_stretch([memory[2:5], memory[5:9].view(2, 2)], cpu)
    assert found is not None
    assert found.data_ptr() == memory[2:].data_ptr()
    assert found.nbytes == 28
    assert one_stretch([memory[5:9], memory[2:5]], cpu) is None
    assert one_stretch([memory[::2]], cpu) is None
    assert one_stretch([memory[2:5], torch.zeros(3)], cpu) is None


def test_staging_is_one_buffer() -> None:
    staging, cpu = Staging(), torch.device("cpu")
    first = staging.take(STAGING_BYTES - 8, cpu)
    second, beyond = staging.take(8, cpu), staging.take(8, cpu)
    assert second.data_ptr() == first.data_ptr() + first.nbytes
    assert beyond.untyped_storage().nbytes() == 8
    staging.reset()
    assert staging.take(8, cpu).data_ptr() == first.data_ptr()


def test_a_rank_that_does_not_come_is_waited_for_so_long(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 2)
    with pytest.raises(ExchangeError, match=r"participant 0 of 2 could not connect .* within 1 s"):
        Channels(store, "session", number=0, size=2, timeout=1)
