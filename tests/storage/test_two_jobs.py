"""Two jobs save to one path: one of the two checkpoints is there afterwards, and who lost knows."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from dcp_fsdp_osd.storage import StreamingReader, StreamingWriter
from tests.breadth import always
from tests.ranks import run_ranks
from tests.servers import FaultProxy, S3Endpoint, fault_proxy, s3_server
from tests.storage.fakes import Killed, Script

pytestmark = pytest.mark.filterwarnings("ignore")  # DCP warns that there is no process group

ROUNDS, MANY = 6, 200


def _state(version: int) -> dict[str, Any]:
    values = {f"t{i}": torch.full((3000 + i,), 10 * version + i) for i in range(4)}
    return {**values, "version": torch.tensor(version), "label": f"version {version}"}


def _loaded(url: str, options: dict[str, Any]) -> int:
    """The version that loads, checked to the bit."""
    state = _state(0)
    dcp.load(state, storage_reader=StreamingReader(url, **options), no_dist=True)
    version = int(state["version"])
    for name, expected in _state(version).items():
        found = state[name]
        same = torch.equal(found, expected) if torch.is_tensor(expected) else found == expected
        assert same, f"{name} is not of version {version}"
    return version


class _Together(dcp.DefaultSavePlanner):
    """No job writes before both have begun."""

    def create_global_plan(self, all_plans: Any) -> Any:
        dist.barrier()
        return super().create_global_plan(all_plans)


def _rounds(rank: int, world_size: int, root: str, options: dict[str, Any], rounds: int) -> int:
    """Each rank is a job of its own; how many rounds this one has won."""
    won = 0
    for number in range(rounds):
        # New or there already, with and without overwriting; begun together, or just about.
        there, overwrite, together = number % 3 == 2, number % 3 > 0, number % 4 < 3
        url = f"{root}/{number}"
        if there and rank == 0:
            dcp.save(_state(9), storage_writer=StreamingWriter(url, **options), no_dist=True)
        writer = StreamingWriter(url, overwrite=overwrite, **options)
        planner = _Together() if together else dcp.DefaultSavePlanner()
        mine = 2 * number + rank + 10
        dist.barrier()
        told = ""
        try:
            dcp.save(_state(mine), storage_writer=writer, planner=planner, no_dist=True)
        except CheckpointException as error:
            told = str(error)
        all_told: list[str] = [""] * world_size
        dist.all_gather_object(all_told, told)
        version = _loaded(url, options)
        winner = version - 2 * number - 10
        assert winner in (0, 1), f"round {number}: version {version} loads; told: {all_told}"
        assert all_told[winner] == "", f"round {number}: the winner was told {all_told}"
        loser = all_told[1 - winner]
        if loser or together or not overwrite:
            assert "another save was committed" in loser or "already exists" in loser, (
                f"round {number}: the loser was told {all_told}"
            )
        won += winner == rank
        # Nothing of the loser is left.
        store = writer._session.store
        dist.barrier()
        names = {name.rpartition("_")[2] for name in store.sizes()}
        assert len(names) == 2, f"round {number}: {sorted(store.sizes())}"
        dist.barrier()
    return won


@pytest.fixture
def s3() -> Iterator[S3Endpoint]:
    with s3_server(memory=8 << 30) as server:
        yield server


@pytest.fixture
def careless(s3: S3Endpoint) -> Iterator[FaultProxy]:
    """A server that ignores If-None-Match and If-Match."""
    with fault_proxy(s3) as proxy:
        proxy.dropped |= {"if-none-match", "if-match"}
        yield proxy


PLACES = ("local", "s3fs", "obstore", "s3fs careless", "obstore careless")


def _race(request: pytest.FixtureRequest, tmp_path: Path, where: str, rounds: int) -> None:
    if where == "local":
        root, options = str(tmp_path), {}
    else:
        s3 = request.getfixturevalue("s3")
        if "careless" in where:
            s3 = request.getfixturevalue("careless").s3
        backend = where.split(maxsplit=1)[0]
        kind = {"s3fs": "fsspec", "obstore": "obstore"}[backend]
        keys = s3.storage_options if backend == "s3fs" else s3.obstore_options
        root = s3.url(f"two/{where.replace(' ', '-')}-{rounds}")
        options = {"backend": kind, "storage_options": keys}
    won = run_ranks(_rounds, 2, root, options, rounds, timeout=590)
    assert sum(won) == rounds
    print(f"{where}: {rounds} rounds, won {won}")


@pytest.mark.parametrize("where", always(["local", "s3fs", "obstore careless"], PLACES))
def test_two_jobs(request: pytest.FixtureRequest, tmp_path: Path, where: str) -> None:
    _race(request, tmp_path, where, ROUNDS)


@pytest.mark.slow
@pytest.mark.parametrize("where", PLACES)
def test_two_jobs_many_rounds(request: pytest.FixtureRequest, tmp_path: Path, where: str) -> None:
    _race(request, tmp_path, where, MANY)


def _save(path: Path, version: int, **arguments: Any) -> None:
    writer = StreamingWriter(path, fsync=False, **arguments)
    dcp.save(_state(version), storage_writer=writer, no_dist=True)


def _at(operation: str, name: str, do: Any) -> Script:
    """Does something once, before a call."""

    def before(called: str, of: str) -> None:
        if called == operation and of.endswith(name):
            script.before = lambda operation, name: None
            do()

    script = Script(before=before)
    return script


@pytest.mark.parametrize("there", [False, True])
def test_who_commits_first_wins(tmp_path: Path, there: bool) -> None:
    """One save begins and ends while another one writes."""
    path = tmp_path / "c"
    if there:
        _save(path, 1)
    script = _at("write", ".distcp", lambda: _save(path, 2, overwrite=True))
    with pytest.raises(CheckpointException, match="another save was committed here"):
        _save(path, 3, overwrite=True, backend=script.store)
    assert _loaded(str(path), {}) == 2
    assert len(list(path.iterdir())) == 2


def test_a_save_that_began_later_keeps_its_files(tmp_path: Path) -> None:
    """What another save has written since this one began is not this one's to delete."""
    path = tmp_path / "c"
    foreign = path / f"__0_0_{'ab' * 16}.distcp"
    _save(path, 1)
    script = _at("write", ".distcp", lambda: foreign.write_text("of a save that is under way"))
    _save(path, 2, overwrite=True, backend=script.store)
    assert foreign.exists()
    _save(path, 3, overwrite=True)
    assert not foreign.exists()
    assert _loaded(str(path), {}) == 3


def test_an_old_checkpoint_that_was_moved_away_is_no_rival(tmp_path: Path) -> None:
    path = tmp_path / "c"
    _save(path, 1)
    script = _at("write", ".distcp", (path / ".metadata").unlink)
    _save(path, 2, overwrite=True, backend=script.store)
    assert _loaded(str(path), {}) == 2


def test_a_save_killed_at_its_commit_is_waited_for_once(tmp_path: Path) -> None:
    path = tmp_path / "c"

    def killed() -> None:
        script.before = lambda operation, name: (_ for _ in ()).throw(Killed)
        raise Killed

    script = _at("put", ".metadata", killed)
    with pytest.raises((CheckpointException, Killed)):
        _save(path, 1, backend=script.store)
    assert any(p.name.endswith(".committing") for p in path.iterdir())
    begin = time.monotonic()
    _save(path, 2, stall_seconds=1)
    assert 1 <= time.monotonic() - begin < 10
    assert len(list(path.iterdir())) == 2


def test_a_save_taken_for_dead_does_not_repeat_its_commit(tmp_path: Path) -> None:
    """It stalls in its commit, another one is committed meanwhile, and only then it fails."""
    path = tmp_path / "c"

    def stall() -> None:
        _save(path, 2, overwrite=True, stall_seconds=0.1)
        raise ConnectionResetError

    script = _at("put", ".metadata", stall)
    with pytest.raises(CheckpointException, match="went on without it"):
        _save(path, 1, overwrite=True, backend=script.store)
    assert _loaded(str(path), {}) == 2
    assert len(list(path.iterdir())) == 2


def test_many_saves_at_once(tmp_path: Path) -> None:
    """Eight threads: all told but one, and nobody waits for a limit."""
    path = tmp_path / "c"
    start = threading.Barrier(8)
    told: list[str] = []

    def run(version: int) -> None:
        try:
            start.wait()
            _save(path, version)
        except CheckpointException as error:
            told.append(str(error))

    threads = [threading.Thread(target=run, args=(version,)) for version in range(1, 9)]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - begin < 30
    assert len(told) == 7
    for text in told:
        assert "already exists" in text, text
    assert _loaded(str(path), {}) in range(1, 9)
    assert len(list(path.iterdir())) == 2
