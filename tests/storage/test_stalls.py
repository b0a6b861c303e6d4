"""Calls of a store that never return, other than those that move data: each has a time limit."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from dcp_fsdp_osd import CheckpointManager, latest
from dcp_fsdp_osd.errors import StorageError
from dcp_fsdp_osd.storage import StreamingReader, StreamingWriter
from dcp_fsdp_osd.storage.session import SYNCED, make_session
from dcp_fsdp_osd.storage.transfer import RetryPolicy, StalledError, Stats, bounded
from tests.ranks import run_ranks
from tests.storage.fakes import Script
from tests.storage.states import assert_same, load

pytestmark = pytest.mark.filterwarnings("ignore")  # DCP warns that there is no process group

STALL = 0.1
LIMIT = 20.0
"""Seconds, which are to be far less than for ever, and no matter on a busy machine."""
STATE = {"a": torch.arange(1000.0), "b": torch.arange(2000)}
NEW = {"a": torch.arange(1000.0) + 1, "b": torch.arange(2000) + 1}


class Stuck:
    """A script under which a call of that name and file hangs until the test is over."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.fell = 0

    def at(self, operation: str, of: str = "", skip: int = 0) -> Script:
        seen = 0

        def before(called: str, name: str) -> None:
            nonlocal seen
            if called == operation and of in ("", name):
                seen += 1
                if seen > skip:
                    self.fell += 1
                    self.over.wait(3 * LIMIT)
                    raise OSError(5, "the stall is over")

        return Script(before=before)


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    found = Stuck()
    yield found
    found.over.set()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    dcp.save(dict(STATE), storage_writer=StreamingWriter(tmp_path / "step-1", fsync=False))
    return tmp_path / "step-1"


def _raises(stuck: Stuck, call: Callable[[], Any], what: str = "no answer for") -> None:
    begin = time.monotonic()
    with pytest.raises((CheckpointException, StorageError), match=f"(?s){what}.*stall_seconds"):
        call()
    assert stuck.fell and time.monotonic() - begin < LIMIT


@pytest.mark.parametrize(
    ("operation", "large"), [("size", False), ("read whole", False), ("read", True)]
)
def test_metadata_that_do_not_come(
    tmp_path: Path, stuck: Stuck, operation: str, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if large:  # the ends are looked at, and then the index or the whole
        monkeypatch.setattr("dcp_fsdp_osd.storage.reader._LARGE", 1)
    dcp.save(dict(STATE), storage_writer=StreamingWriter(tmp_path / "c", fsync=False))
    script = stuck.at(operation, ".metadata")
    _raises(
        stuck,
        lambda: load(
            StreamingReader(tmp_path / "c", backend=script.store, stall_seconds=STALL), STATE
        ),
    )
    assert_same(load(StreamingReader(tmp_path / "c"), STATE), STATE)


@pytest.mark.parametrize("operation", ["list", "create", "put", "read"])
def test_a_save_that_is_not_answered(path: Path, stuck: Stuck, operation: str) -> None:
    """An overwrite: it lists, looks at what is there, makes files, and commits."""
    script = stuck.at(operation)
    _raises(stuck, lambda: _save(path, NEW, backend=script.store, stall_seconds=STALL))
    assert_same(load(StreamingReader(path), STATE), STATE)
    stuck.over.set()
    _save(path, NEW)
    assert_same(load(StreamingReader(path), STATE), NEW)
    assert {each.suffix for each in path.iterdir()} == {".distcp", ""}


def _save(path: Path, state: dict[str, Any], **arguments: Any) -> None:
    writer = StreamingWriter(path, overwrite=True, fsync=False, **arguments)
    dcp.save(dict(state), storage_writer=writer)


def test_a_commit_that_is_not_answered_may_be_done_yet(tmp_path: Path) -> None:
    """The request that commits hangs, the save raises, and then it is done: all files are there."""
    wakes, done = threading.Event(), threading.Event()

    def before(operation: str, name: str) -> None:
        if (operation, name) == ("put", ".metadata"):
            wakes.wait()

    def after(operation: str, name: str) -> None:
        if (operation, name) == ("put", ".metadata"):
            done.set()

    script = Script(before=before, after=after)
    with pytest.raises(CheckpointException, match=r"commit \.metadata: no answer for 1 s"):
        _save(tmp_path / "c", STATE, backend=script.store, stall_seconds=1 / SYNCED)
    wakes.set()
    assert done.wait(LIMIT)
    assert_same(load(StreamingReader(tmp_path / "c"), STATE), STATE)


def test_who_looks_for_checkpoints_is_told(path: Path, stuck: Stuck) -> None:
    at = {"backend": stuck.at("commits").store, "stall_seconds": STALL}
    _raises(stuck, lambda: latest(path.parent, **at))
    with CheckpointManager(path.parent, preempt_signals=(), **at) as manager:
        _raises(stuck, manager.steps)


def test_what_is_slow_or_fails_is_no_stall(tmp_path: Path) -> None:
    """Pauses between tries are longer than the limit; and a call has time for its bytes."""
    session = make_session(
        tmp_path, stall_seconds=0.2, retry=RetryPolicy(tries=4, first=0.3, longest=0.4)
    )
    tries = 0

    def fails() -> int:
        nonlocal tries
        tries += 1
        if tries < 4:
            raise ConnectionResetError
        return tries

    assert session.call(fails, "x", Stats()) == 4
    session.call(lambda: time.sleep(0.5), "x", Stats(), nbytes=1 << 30)
    with pytest.raises(StalledError, match="rank 0: x: no answer for 0 s"):
        session.call(lambda: time.sleep(0.5), "x", Stats(), nbytes=1000)


def test_errors_and_results_pass_through() -> None:
    error = FileNotFoundError("x")

    def fails() -> None:
        raise error

    with pytest.raises(FileNotFoundError) as raised:
        bounded(fails, stall=LIMIT, what="x")
    assert raised.value is error
    assert bounded(lambda: json.dumps([1]), stall=LIMIT, what="x") == "[1]"


def _load_on_ranks(rank: int, world: int, path: str) -> list[str]:
    said = []
    for shared in (False, True):
        stuck = Stuck()
        backend: Any = stuck.at("read whole", ".metadata").store if rank == 0 else "auto"
        group = torch.distributed.group.WORLD if shared else None
        reader = StreamingReader(path, backend=backend, stall_seconds=STALL, process_group=group)
        try:
            dcp.load({key: value.clone() for key, value in STATE.items()}, storage_reader=reader)
        except CheckpointException as error:
            said.append(str(error))
        stuck.over.set()
    return said


def test_every_rank_raises(path: Path) -> None:
    """The one that hangs, and the other, which read for itself or waits for what that one read."""
    for said in run_ranks(_load_on_ranks, 2, str(path)):
        assert len(said) == 2 and all("read .metadata: no answer for 0 s" in each for each in said)
