"""What several ranks want alike is read once: real ranks, with stores that count every read."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

from dcp_fsdp_osd import (
    FlatOptimLoadPlanner,
    FlatOptimSavePlanner,
    StreamingReader,
    StreamingWriter,
)
from tests.breadth import always
from tests.exchange.jobs import KINDS, CountingReader, large, whole, wrapped
from tests.models import Mlp, train_steps
from tests.planners.checks import assert_same, raw
from tests.ranks import run_ranks
from tests.servers import EmbeddedS3, s3_server
from tests.torch_gaps import needs_groups_without_rank_0, stock_fsspec

READERS: dict[str, Any] = {"stock": CountingReader, "streaming": StreamingReader}


@pytest.fixture(scope="module")
def s3() -> Iterator[EmbeddedS3]:
    with s3_server(memory=1 << 30) as server:
        yield server


def _round_trip(rank: int, world: int, path: str, kind: str, reader: str) -> Any:
    model, optim = wrapped(kind, world, steps=2)
    state = {"optim": optim.state_dict(), "note": {"epoch": 3, "text": "x" * 1000}}
    dcp.save(
        state,
        storage_writer=StreamingWriter(path),
        planner=FlatOptimSavePlanner(model, optim),
    )
    expected = whole(model, optim)
    model, optim = wrapped(kind, world, steps=0)
    planner = FlatOptimLoadPlanner(model, optim, broadcast=True)
    loaded: dict[str, Any] = {"optim": {}, "note": {"epoch": 0, "text": ""}}
    storage = READERS[reader](path)
    dcp.load(loaded, storage_reader=storage, planner=planner)
    assert loaded["note"] == state["note"]
    optim.load_state_dict(loaded["optim"])
    assert_same(whole(model, optim), expected)
    train_steps(model, optim, 1)
    sizes = storage.sizes if reader == "stock" else {}
    return storage.entries if reader == "stock" else [], sizes, planner.exchanged


@pytest.mark.each_value
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", KINDS)
def test_replicated_state_is_read_once(tmp_path: Path, kind: str, reader: str) -> None:
    results = run_ranks(_round_trip, 4, str(tmp_path), kind, reader)
    if reader == "stock":
        entries = [entry for found, _, _ in results for entry in found]
        assert len(entries) == len(set(entries))
        assert {entry[:2]: entry[2] for entry in entries} == results[0][1]
    for _, _, exchanged in results:
        assert exchanged.sent + exchanged.received > 0


def _save_large(rank: int, world: int, kind: str, url: str, options: Any) -> int:
    model, optim = wrapped(kind, world, steps=1, model=large)
    dcp.save(
        {"optim": optim.state_dict()},
        storage_writer=StreamingWriter(url, storage_options=options, backend="fsspec"),
        planner=FlatOptimSavePlanner(model, optim),
    )
    shards = world // 2 if kind == "hsdp" else 1
    return sum(t.nbytes for t in _tensors(optim.state_dict()["state"])) * shards


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)


def _load_large(
    rank: int, world: int, kind: str, url: str, options: Any, reader: str, broadcast: Any
) -> Any:
    model, optim = wrapped(kind, world, steps=0, model=large)
    storage: Any
    if reader == "streaming":
        storage = StreamingReader(url, storage_options=options, backend="fsspec")
    else:
        storage = stock_fsspec(FsspecReader, url, **options)
    planner = FlatOptimLoadPlanner(model, optim, broadcast=broadcast)
    state: dict[str, Any] = {"optim": {}}
    dcp.load(state, storage_reader=storage, planner=planner)
    optim.load_state_dict(state["optim"])
    return planner.exchanged is not None, _seen(optim)


def _seen(optim: Any) -> list[str]:
    return [hashlib.sha256(raw(t)).hexdigest() for t in _tensors(optim.state_dict()["state"])]


@pytest.mark.parametrize("kind", always(["hsdp"], ["hsdp", "no_shard", "ddp"]))
def test_bytes_that_the_store_sends(s3: EmbeddedS3, kind: str) -> None:
    """Of all ranks together, at most 1.02 times what is there; without the exchange, all of it."""
    url, options = s3.url(kind), s3.storage_options
    unique = run_ranks(_save_large, 4, kind, url, options, timeout=120)[0]
    assert unique > 16 << 20
    seen = []
    cases: list[tuple[str, Any]] = [("streaming", "auto"), ("fsspec", True)]
    if kind == "hsdp":
        cases.append(("streaming", False))
    for reader, broadcast in cases:
        s3.reset_stats()
        results = run_ranks(_load_large, 4, kind, url, options, reader, broadcast, timeout=120)
        sent = s3.stats()
        seen.append(results[0][1])
        print(kind, reader, broadcast, sent["bytes_out"] / unique, sent["requests"])
        replicas = 2 if kind == "hsdp" else 4
        if broadcast is False:
            assert sent["bytes_out"] >= replicas * unique
            assert not any(exchanged for exchanged, _ in results)
        elif reader == "streaming":
            assert sent["bytes_out"] <= 1.02 * unique
            assert all(exchanged for exchanged, _ in results)
        else:  # s3fs reads ahead, in blocks of its own
            assert sent["bytes_out"] < replicas * unique
    assert all(each == seen[0] for each in seen)


def _requests(rank: int, world: int, path: str, depth: int) -> Any:
    def build() -> Any:
        return Mlp(depth=depth)

    model, optim = wrapped("hsdp", world, steps=1, model=build)
    dcp.save(
        {"optim": optim.state_dict(), "note": {"epoch": 3}},
        storage_writer=StreamingWriter(path),
        planner=FlatOptimSavePlanner(model, optim),
    )
    reader = StreamingReader(path)
    planner = FlatOptimLoadPlanner(model, optim, broadcast=True)
    dcp.load({"optim": {}, "note": {"epoch": 0}}, storage_reader=reader, planner=planner)
    return reader.stats.requests


def test_requests_do_not_grow_with_the_number_of_parameters(tmp_path: Path) -> None:
    few = run_ranks(_requests, 4, str(tmp_path / "few"), 2)
    many = run_ranks(_requests, 4, str(tmp_path / "many"), 12)
    assert max(few + many) <= 10
    assert sum(many) <= sum(few) + 4


def _late(rank: int, world: int, path: str) -> float:
    class Late(CountingReader):
        def read_data(self, plan: Any, planner: Any) -> Any:
            if rank == 1:
                time.sleep(6)  # three signs of life
            return super().read_data(plan, planner)

    model, optim = wrapped("ddp", world, steps=1)
    dcp.save(
        {"optim": optim.state_dict()},
        storage_writer=StreamingWriter(path),
        planner=FlatOptimSavePlanner(model, optim),
    )
    expected = whole(model, optim)
    model, optim = wrapped("ddp", world, steps=0)
    planner = FlatOptimLoadPlanner(model, optim, broadcast=True, stall_seconds=20)
    state: dict[str, Any] = {"optim": {}}
    if rank == 2:
        time.sleep(2)
    dcp.load(state, storage_reader=Late(path), planner=planner)
    optim.load_state_dict(state["optim"])
    assert_same(whole(model, optim), expected)
    return 0.0


def test_late_ranks(tmp_path: Path) -> None:
    run_ranks(_late, 3, str(tmp_path))


def _subgroup(rank: int, world: int, path: str, reader: str) -> Any:
    """Ranks 2 and 3 train and load; the others talk among themselves meanwhile."""
    mine, others = dist.new_group([2, 3]), dist.new_group([0, 1])
    if rank < 2:
        for _ in range(30):
            dist.all_reduce(torch.ones(3), group=others)
        return None
    model, optim = wrapped("ddp", 2, steps=2, model=lambda: Mlp(seed=4), group=mine)
    dcp.save(
        {"optim": optim.state_dict()},
        storage_writer=StreamingWriter(path),
        planner=FlatOptimSavePlanner(model, optim),
        process_group=mine,
    )
    expected = optim.state_dict()
    model, optim = wrapped("ddp", 2, steps=0, model=lambda: Mlp(seed=4), group=mine)
    for _ in range(2):
        planner = FlatOptimLoadPlanner(model, optim, broadcast=True)
        state: dict[str, Any] = {"optim": {}}
        storage = READERS[reader](path)
        dcp.load(state, storage_reader=storage, planner=planner, process_group=mine)
        assert_same(state["optim"], expected)
        assert planner.exchanged is not None
    return storage.entries if reader == "stock" else None


@needs_groups_without_rank_0
@pytest.mark.parametrize("reader", READERS)
def test_a_subgroup_involves_nobody_else(tmp_path: Path, reader: str) -> None:
    results = run_ranks(_subgroup, 4, str(tmp_path), reader)
    if reader == "stock":
        entries = results[2] + results[3]
        assert len(entries) == len(set(entries))


def _uneven(rank: int, world: int, path: str, reader: str) -> Any:
    """Ranks 0 and 1 shard the model; rank 2 has one of its own."""
    pair, single = dist.new_group([0, 1]), dist.new_group([2])
    kind, group = ("fsdp", pair) if rank < 2 else ("plain", single)
    model, optim = wrapped(kind, world, steps=0, model=large_or_small(reader), group=group)
    results = []
    for broadcast in (False, True):
        storage = READERS[reader](path)
        planner = FlatOptimLoadPlanner(model, optim, broadcast=broadcast)
        state: dict[str, Any] = {"optim": {}}
        dcp.load(state, storage_reader=storage, planner=planner)
        results.append(state["optim"])
        assert (planner.exchanged is not None) == broadcast
    assert_same(results[1], results[0])
    if reader == "stock":
        return storage.entries, storage.sizes
    return storage.stats.bytes


def large_or_small(reader: str) -> Any:
    return "mlp" if reader == "stock" else large


def _save_alone(rank: int, world: int, path: str, reader: str) -> int:
    model, optim = wrapped("plain", 1, steps=2, model=large_or_small(reader))
    dcp.save(
        {"optim": optim.state_dict()},
        storage_writer=StreamingWriter(path),
        planner=FlatOptimSavePlanner(model, optim),
    )
    return sum(t.nbytes for t in _tensors(optim.state_dict()["state"]))


@pytest.mark.parametrize("reader", READERS)
def test_uneven_replicas(tmp_path: Path, reader: str) -> None:
    """Wants that differ in part; the stock reader reads a chunk whole, and still once."""
    unique = run_ranks(_save_alone, 1, str(tmp_path), reader, timeout=120)[0]
    results = run_ranks(_uneven, 3, str(tmp_path), reader, timeout=120)
    if reader == "stock":
        entries = [entry for found, _ in results for entry in found]
        assert len(entries) == len(set(entries))
        assert {entry[:2]: entry[2] for entry in entries} == results[0][1]
    else:
        print("bytes read / unique", sum(results) / unique)
        assert sum(results) <= 1.02 * unique
