"""Whatever call fails, or is the last before the process ends: the old checkpoint or the new."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from dcp_fsdp_osd.errors import StorageError
from dcp_fsdp_osd.storage import StreamingReader, StreamingWriter, latest
from dcp_fsdp_osd.storage.transfer import RetryPolicy
from tests.storage.conftest import Place
from tests.storage.fakes import Killed, Script, fail_at, fail_first
from tests.storage.states import assert_same, load

pytestmark = pytest.mark.filterwarnings("ignore")  # DCP warns that there is no process group

OLD = {"t": torch.arange(50_000), "small": torch.tensor(1.0), "name": "old"}
NEW = {"t": torch.arange(50_000).flip(0), "small": torch.tensor(2.0), "name": "new"}


def save(path: Path, state: Any, script: Script | None = None, **arguments: Any) -> None:
    backend: Any = script.store if script else "auto"
    writer = StreamingWriter(
        path, backend=backend, fsync=False, part_size=1 << 17, concurrency=2, **arguments
    )
    dcp.save(dict(state), storage_writer=writer)


def loaded(path: Path) -> Any:
    return load(StreamingReader(path), OLD)


def names(path: Path) -> set[str]:
    return {p.name for p in path.iterdir()} if path.exists() else set()


def count_calls(path: Path, **arguments: Any) -> int:
    script = Script()
    save(path, NEW, script, **arguments)
    return len(script.calls)


@pytest.mark.parametrize("when", ["before", "after"])
def test_every_call_can_be_the_last(tmp_path: Path, when: str) -> None:
    """As if the process had ended before, or after, each call of an overwriting save."""
    save(tmp_path / "probe", OLD)
    calls = count_calls(tmp_path / "probe", overwrite=True)
    outcomes = []
    for number in range(calls):
        path = tmp_path / f"{when}{number}"
        save(path, OLD)
        script = Script(**{when: fail_at(number, Killed)})
        with pytest.raises((CheckpointException, Killed)):
            save(path, NEW, script, overwrite=True)
        found = loaded(path)
        assert_same(found, NEW if found["name"] == "new" else OLD)
        outcomes.append(found["name"])
        # Whatever is left over, the next save works and leaves nothing else behind.  It waits for
        # as long as it takes a save that was killed at its commit to be alive.
        save(path, NEW, overwrite=True, stall_seconds=0.1)
        assert_same(loaded(path), NEW)
        assert len(names(path)) == 2
    assert "old" in outcomes
    # Once new, never old again.
    assert outcomes == sorted(outcomes, reverse=True)


@pytest.mark.parametrize("overwrite", [False, True])
def test_every_call_can_fail(tmp_path: Path, overwrite: bool) -> None:
    """An error at each call: raised, and the failed save's files are gone."""
    probe = tmp_path / "probe"
    if overwrite:
        save(probe, OLD)
    calls = count_calls(probe, overwrite=overwrite)
    for number in range(calls):
        path = tmp_path / str(number)
        if overwrite:
            save(path, OLD)
        before = names(path)
        script = Script(before=fail_at(number, lambda: OSError(5, "disk trouble")))
        try:
            save(path, NEW, script, overwrite=overwrite)
        except CheckpointException as error:
            assert "disk trouble" in str(error), number
            # The old checkpoint and nothing else, or nothing at all.
            assert names(path) == before, number
            assert latest(tmp_path) is None or not overwrite or loaded(path)["name"] == "old"
        else:
            # Only deleting what was replaced may fail without an error.
            assert script.calls[number][0] == "delete"
            assert_same(loaded(path), NEW)


@pytest.mark.each_value
@pytest.mark.parametrize("how", ["refuses", "says nothing"])
@pytest.mark.parametrize("operation", ["write", "put"])
def test_cleaning_up_has_one_time_limit(tmp_path: Path, operation: str, how: str) -> None:
    """The storage dies in the middle: no step of the clean-up gets a retry budget of its own."""
    dead = threading.Event()

    def before(called: str, name: str) -> None:
        if called == operation:
            dead.set()
            raise ConnectionResetError
        if dead.is_set():
            if how == "says nothing":
                time.sleep(4)
            raise ConnectionRefusedError

    retry = RetryPolicy(tries=10**6, seconds=1, first=0.01, longest=0.1)
    begin = time.monotonic()
    with pytest.raises(CheckpointException, match="gave up after"):
        save(tmp_path / "c", NEW, Script(before=before), retry=retry, stall_seconds=1.5)
    # 1 s of retries, then 1.5 s of cleaning up.
    assert time.monotonic() - begin < (4.5 if operation == "write" else 7.5)


def test_a_commit_whose_answer_is_lost_is_a_commit(tmp_path: Path) -> None:
    script = Script(
        after=fail_first("put", 1, lambda: OSError(5, "connection lost"), of=".metadata")
    )
    save(tmp_path / "c", NEW, script)
    assert_same(loaded(tmp_path / "c"), NEW)


def test_a_commit_in_doubt_keeps_the_files(tmp_path: Path) -> None:
    """The answer to the commit is lost, and looking what is there fails too."""
    down: list[bool] = []

    def after(operation: str, name: str) -> None:
        if operation == "put" and name == ".metadata":
            down.append(True)
            raise OSError(5, "storage is gone")

    def before(operation: str, name: str) -> None:
        if down:
            raise OSError(5, "storage is gone")

    with pytest.raises(CheckpointException, match="storage is gone"):
        save(tmp_path / "c", NEW, Script(before=before, after=after))
    assert_same(loaded(tmp_path / "c"), NEW)


def test_a_transient_error_after_the_commit_took_effect(tmp_path: Path) -> None:
    script = Script(after=fail_first("put", 1, ConnectionResetError, of=".metadata"))
    save(tmp_path / "c", NEW, script, retry=RetryPolicy(first=0.001))
    assert_same(loaded(tmp_path / "c"), NEW)
    assert script.count("put", ".metadata") == 2


def test_a_file_that_shrank_before_the_commit(tmp_path: Path) -> None:
    path = tmp_path / "c"

    def after(operation: str, name: str) -> None:
        if operation == "complete":
            os.truncate(path / name, 100)

    with pytest.raises(CheckpointException, match=r"expected .* bytes, found 100"):
        save(path, NEW, Script(after=after))
    assert names(path) == set()


@pytest.mark.parametrize("moment", ["write", "put"])
def test_two_writers_one_wins(tmp_path: Path, moment: str) -> None:
    path = tmp_path / "c"

    def before(operation: str, name: str) -> None:
        if operation == moment and (moment == "write" or name == ".metadata"):
            script.before = lambda operation, name: None
            # To this one the other is dead, or it would wait for it.
            save(path, OLD, stall_seconds=0.1)

    script = Script(before=before)
    with pytest.raises(CheckpointException, match="already exists"):
        save(path, NEW, script)
    assert_same(loaded(path), OLD)


def test_exclusive_on_every_store(place: Place) -> None:
    """The conditional PUT itself, without looking first."""
    store = place.store()
    store.put("x", b"one", exclusive=True)
    with pytest.raises(FileExistsError):
        store.put("x", b"two", exclusive=True)
    assert store.read("x", 10) == b"one"
    store.put("x", b"three", exclusive=False)
    assert store.read("x", 10) == b"three"


def test_a_failed_save_leaves_nothing(place: Place) -> None:
    class Failing(dcp.DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            if write_item.index.fqn == "z":
                raise ValueError("no such data")
            return super().resolve_data(write_item)

    state = {"a": torch.zeros(3_000_000), "b": torch.zeros(10), "z": torch.zeros(3_000_000)}
    with pytest.raises(CheckpointException, match="no such data"):
        dcp.save(state, storage_writer=place.writer(), planner=Failing())
    assert place.store().sizes() == {}
    assert place.uploads() == []


def test_other_files_stay(tmp_path: Path) -> None:
    path = tmp_path / "c"
    save(path, OLD)
    (path / "config.json").write_text("{}")
    (path / "__9_0_killed.distcp").write_text("debris")
    save(path, NEW, overwrite=True)
    assert (path / "config.json").exists()
    assert len(names(path)) == 3


def test_collectives_and_none_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "c"
    save(path, OLD)
    writer = StreamingWriter(path, overwrite=True)
    with pytest.raises(StorageError, match="without collectives"):
        dcp.save(dict(NEW), storage_writer=writer, use_collectives=False)
    assert_same(loaded(path), OLD)
    other = tmp_path / "d"
    dcp.save(dict(OLD), storage_writer=StreamingWriter(other), use_collectives=False)
    save(other, NEW, overwrite=True)
    assert_same(loaded(other), NEW)
    assert "__0.metadata" not in names(other)
