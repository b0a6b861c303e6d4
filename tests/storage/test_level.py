"""How many requests are under way: found from counts alone, and by a store that takes its time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from benchmarks.latency import latency_store
from dcp_fsdp_osd.storage import StreamingReader, StreamingWriter
from dcp_fsdp_osd.storage.level import Level
from dcp_fsdp_osd.storage.workers import Workers

SIZE = 8 << 20


def _settles(level: Level, seconds_of: Callable[[int], float], turns: int) -> list[int]:
    """Levels after each turn of as many requests as are under way, which take so many seconds."""
    nbytes, tasks, now, seen = 0, 0, 0.0, []
    level.observe(nbytes, tasks, now)
    for _ in range(turns):
        under_way = level.now
        now += seconds_of(under_way)
        nbytes, tasks = nbytes + under_way * SIZE, tasks + under_way
        seen.append(level.observe(nbytes, tasks, now))
    return seen


def test_it_rises_while_that_pays() -> None:
    assert _settles(Level(4, 32), lambda under_way: 0.013, 6) == [16, 32, 32, 32, 32, 32]


@pytest.mark.parametrize("streams", [4, 8, 11, 16, 24])
def test_it_settles_where_the_line_is_full(streams: int) -> None:
    """Of so many streams that the line carries; at a level that gives 0.8 of what all do."""
    seen = _settles(Level(4, 32), lambda under_way: 0.01 * max(1, under_way / streams), 40)
    usual = max(set(seen), key=seen.count)
    assert min(usual, streams) >= 0.7 * streams
    assert usual <= 4 * streams


def test_it_stays_where_more_is_not_faster() -> None:
    """As where all comes from memory: a ninth of what is read is spent on trying."""
    seen = _settles(Level(4, 32), lambda under_way: 0.001 * under_way, 100)
    assert set(seen) == {4, 16}
    assert 2 <= seen.count(16) <= 4


def test_it_finds_out_later_what_chance_hid() -> None:
    turn = 0

    def seconds(under_way: int) -> float:
        nonlocal turn
        turn += 1
        return 0.1 if turn == 2 else 0.01  # somebody else used the line in the second turn

    seen = _settles(Level(4, 32), seconds, 40)
    assert seen[:2] == [16, 4] and seen[-1] == 32


def test_what_the_user_said_stays() -> None:
    assert set(_settles(Level(3), lambda under_way: 0.01, 20)) == {3}
    assert set(_settles(Level(40, 32), lambda under_way: 0.01, 20)) == {40}


def test_counts_that_say_nothing_change_nothing() -> None:
    level = Level(4, 32)
    for _ in range(20):
        assert level.observe(100, 50, 1.0) == 4  # no time has gone by
    assert level.observe(100, 53, 2.0) == 4  # less than a turn
    assert level.observe(100, 54, 3.0) == 16


def test_threads_follow_the_level() -> None:
    """Up at once, with what waits; down after what was submitted before."""
    workers = Workers(2, "level")
    running: list[int] = []
    now, lock = 0, threading.Lock()

    def task(gate: threading.Barrier | None) -> None:
        nonlocal now
        with lock:
            now += 1
            running.append(now)
        if gate is not None:
            gate.wait(20)
        with lock:
            now -= 1

    gate = threading.Barrier(8)
    tasks = [workers.submit(lambda: task(gate)) for _ in range(8)]  # two run, and wait for six
    workers.allow(8)
    for each in tasks:
        each.result(20)
    assert max(running) == 8
    workers.allow(2)
    workers.submit(lambda: None).result(20)
    end = time.monotonic() + 20
    while sum(each.name == "level" for each in threading.enumerate()) > 2:
        assert time.monotonic() < end
        time.sleep(0.001)
    running.clear()
    for each in [workers.submit(lambda: task(None)) for _ in range(500)]:
        each.result(20)
    assert max(running) <= 2
    workers.allow(5)
    gate = threading.Barrier(5)
    for each in [workers.submit(lambda: task(gate)) for _ in range(5)]:
        each.result(20)
    assert workers.end(20)
    assert not any(each.name == "level" for each in threading.enumerate())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("said", "least", "most"), [(None, 5, 32), (3, 1, 3)])
def test_a_local_path_of_long_latency(
    tmp_path: Path, said: int | None, least: int, most: int
) -> None:
    """Requests that wait are many at a time, as many as the user said if he did."""
    before = set(threading.enumerate())
    state = {f"w{n}": torch.full((1 << 14,), float(n)) for n in range(60)}
    options = {"fsync": False, "part_size": 1 << 16, "concurrency": said}
    writes, reads = latency_store(0.03), latency_store(0.03)
    writer = StreamingWriter(tmp_path / "a", backend=writes.open, **options)
    dcp.save(state, storage_writer=writer, no_dist=True)
    target = {key: torch.zeros_like(value) for key, value in state.items()}
    # Every second tensor, so that neighbours make no long request.
    target = {key: value for n, (key, value) in enumerate(target.items()) if n % 2}
    reader = StreamingReader(tmp_path / "a", backend=reads.open, concurrency=said)
    dcp.load(target, storage_reader=reader, no_dist=True)
    assert all(torch.equal(value, state[key]) for key, value in target.items())
    assert least <= writes.most <= most
    assert least <= reads.most <= most
    assert set(threading.enumerate()) <= before
