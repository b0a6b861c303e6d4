"""Restoring: the newest good checkpoint, the same on all ranks, to the bit."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException

from dcp_fsdp_osd import CorruptCheckpointError, FlatModelState, StorageError
from tests.manager.jobs import Run, damage, digest, manager
from tests.models import Mlp
from tests.ranks import run_ranks
from tests.storage.fakes import Script

pytestmark = pytest.mark.filterwarnings("ignore")  # DCP warns that there is no process group


def _resumed_equals_uninterrupted(rank: int, world: int, path: str) -> None:
    whole = Run(seed=1).train(9)
    with manager(path) as first:
        run = Run(seed=1)
        assert run.restored(first) is None and run.step == 0
        assert digest(run) == digest(Run(seed=1))
        for _ in range(6):
            run.train()
            first.save(run.step, run.state())
            run.train(0)
    for blocking in (False, True):
        with manager(path, async_save=not blocking) as second:
            run = Run(seed=2)
            assert run.restored(second) == 6
            assert second.steps() == [4, 5, 6]
            run.train(3)
            assert digest(run) == digest(whole)
            if blocking:
                future = second.save(9, run.state())
                assert future.done() and future.result() == f"{path}/step-9"
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    older = Run(seed=3)
                    assert older.restored(second, step=6) == 6 and older.step == 6
                assert any("there are others (9)" in str(w.message) for w in caught)
                with pytest.raises(StorageError, match="no checkpoint of step 7; the last ones"):
                    older.restored(second, step=7)


def test_a_resumed_run_equals_one_that_never_stopped(tmp_path: Path) -> None:
    run_ranks(_resumed_equals_uninterrupted, 2, str(tmp_path / "not" / "yet" / "there"))
    # Stock reads a folder.
    model = Mlp(seed=5)
    state: dict[str, Any] = {"model": model.state_dict(), "step": 0}
    folder = tmp_path / "not" / "yet" / "there" / "step-9"
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    assert state["step"] == 9
    other: nn.Module = Mlp(seed=6)
    ours = {"model": FlatModelState(other)}
    dcp.load(
        ours,
        storage_reader=dcp.FileSystemReader(folder),
        planner=__import__("dcp_fsdp_osd").FlatOptimLoadPlanner(),
        no_dist=True,
    )
    for name, value in other.state_dict().items():
        assert torch.equal(value, state["model"][name])


def _saved(rank: int, world: int, path: str, steps: list[int]) -> list[int]:
    digests = []
    with manager(path, keep_last=None) as kept:
        run = Run()
        for step in steps:
            run.train(step - run.step)
            kept.save(step, run.state())
            digests.append(digest(run))
    return digests


def _falls_back(rank: int, world: int, path: str) -> tuple[int | None, int, list[str]]:
    with manager(path) as again:
        run = Run(seed=9)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = run.restored(again)
        told = [str(w.message) for w in caught if "is damaged" in str(w.message)]
        return found, digest(run), told


@pytest.mark.parametrize("how", ["flip", "missing", "metadata"])
def test_a_damaged_one_is_passed_over_by_all_ranks(tmp_path: Path, how: str) -> None:
    saved = run_ranks(_saved, 2, str(tmp_path), [1, 2, 10])
    damage(tmp_path / "step-10", how)
    if how == "flip":
        damage(tmp_path / "step-2", "missing")
    found = run_ranks(_falls_back, 2, str(tmp_path))
    number = 0 if how == "flip" else 1
    for rank in range(2):
        assert found[rank][:2] == ([1, 2][number], saved[rank][number])
        assert [text.partition("is damaged")[0][-8:].strip() for text in found[rank][2]] == (
            ["step 10", "of step 2"[-6:]] if how == "flip" else ["step 10"]
        )


def _one_rank_finds_it(rank: int, world: int, path: str) -> int | None:
    """The damage is in what rank 1 alone reads."""
    with manager(path) as again:
        run = Run(seed=9)
        if rank == 1:
            for folder in Path(path).glob("step-2"):
                for name in folder.glob("__1_*.distcp"):
                    data = bytearray(name.read_bytes())
                    data[600:] = bytes(len(data) - 600)
                    name.write_bytes(data)
        dist.barrier()
        return run.restored(again)


def test_damage_that_one_rank_finds(tmp_path: Path) -> None:
    run_ranks(_saved, 2, str(tmp_path), [1, 2])
    assert run_ranks(_one_rank_finds_it, 2, str(tmp_path)) == [1, 1]


def _raises(rank: int, world: int, path: str, wrong: str) -> str:
    with manager(path) as again:
        run = Run(seed=9)
        state = run.state()
        if wrong == "mismatch":
            state["other"] = torch.ones(3)
        try:
            again.restore(state, step=2 if wrong == "step" else None)
        except (Exception, CheckpointException) as error:
            return f"{type(error).__name__}: {error}"
    return "nothing"


def test_what_raises_and_goes_back_to_nothing(tmp_path: Path) -> None:
    run_ranks(_saved, 2, str(tmp_path), [1, 2])
    for text in run_ranks(_raises, 2, str(tmp_path), "mismatch"):
        assert text.startswith("CheckpointException") and "other" in text
    damage(tmp_path / "step-2", "flip")
    for text in run_ranks(_raises, 2, str(tmp_path), "step"):
        assert text.startswith("CheckpointException") and "CorruptCheckpointError" in text
    damage(tmp_path / "step-1", "missing")
    for text in run_ranks(_raises, 2, str(tmp_path), "all"):
        assert text.startswith("CorruptCheckpointError") and "each of the 2" in text
        assert "do not use it" in text and "step 1 of" in text and "step 2 of" in text


def test_names_that_are_no_steps(tmp_path: Path) -> None:
    with manager(tmp_path) as alone:
        alone.save(3, {"x": 1}, wait=True)
        for name in ("step-03", "step-", "step-4.bak", "other", "step--5"):
            (tmp_path / name).mkdir()
            (tmp_path / name / ".metadata").write_bytes(b"x")
        assert alone.steps() == [3]
        state = {"x": 0}
        assert alone.restore(state) == 3 and state == {"x": 1}
    with manager(tmp_path / "step-3" / ".metadata") as alone, pytest.raises(StorageError):
        alone.restore({"x": 0})
    with pytest.raises(CorruptCheckpointError), manager(tmp_path) as alone:
        damage(tmp_path / "step-3", "metadata")
        alone.restore({"x": 0})


class _Own:
    """No checkpoint may make one when it is read."""


@pytest.mark.parametrize("trouble", ["read", "class"])
def test_storage_that_fails_is_no_damage(tmp_path: Path, trouble: str) -> None:
    def before(operation: str, name: str) -> None:
        if trouble == operation and name.endswith(".distcp"):
            raise OSError(5, "the disk has trouble")

    with manager(tmp_path, backend=Script(before=before).store) as alone:
        alone.save(1, {"x": torch.ones(3)}, wait=True)
        value = torch.ones(3) if trouble == "read" else _Own()
        alone.save(2, {"x": value}, wait=True)
        with pytest.raises(CheckpointException) as caught:
            alone.restore({"x": value})
        [(error, _)] = caught.value.failures.values()
        expected = "disk has trouble" if trouble == "read" else "_Own"
        assert expected in str(error)
        assert not isinstance(error, CorruptCheckpointError)
