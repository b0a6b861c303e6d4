"""Saving beside training: what is saved, who learns of errors, and what is left of them."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from dcp_fsdp_osd import CheckpointManager, StorageError
from dcp_fsdp_osd.manager.copying import shares
from dcp_fsdp_osd.manager.steps import Retention
from tests.manager.jobs import Run, damage, digest, manager, raised
from tests.ranks import run_ranks
from tests.storage.fakes import Script
from tests.torch_gaps import needs_groups_without_rank_0

pytestmark = pytest.mark.filterwarnings("ignore")  # DCP warns that there is no process group


def _names(path: str) -> list[str]:
    return sorted(name.name for name in Path(path).iterdir())


def _changed_after(rank: int, world: int, path: str) -> None:
    slow = Script(before=lambda operation, name: time.sleep(0.02))
    with manager(path, backend=slow.store) as saving:
        run = Run().train(2)
        lists = {"a": [1, {"b": torch.arange(3)}], f"rng_{rank}": torch.arange(4)}
        expected = digest(run)
        future = saving.save(2, {**run.state(), **lists})
        assert not future.done()
        lists["a"][1]["b"].zero_()
        lists["a"].append(5)
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter.zero_()
                for value in run.optim.state[parameter].values():
                    value.fill_(7)
        assert future.result(20) == f"{path}/step-2"
        other = Run(seed=4)
        state = {**other.state(), "a": [0, {"b": torch.ones(3)}], f"rng_{rank}": torch.ones(4)}
        assert saving.restore(state) == 2
        other.step = state["step"]
        assert digest(other) == expected
        assert state["a"][0] == 1 and state["a"][1]["b"].tolist() == [0, 1, 2]


def test_what_changes_after_save_is_not_saved(tmp_path: Path) -> None:
    run_ranks(_changed_after, 2, str(tmp_path))


class _Fails:
    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("no state now")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise NotImplementedError


def _errors(rank: int, world: int, path: str) -> dict[str, str]:
    """Each error, and after each a save that succeeds."""
    fail = threading.Event()

    def before(operation: str, name: str) -> None:
        if operation == "write" and rank == 1 and fail.is_set():
            raise OSError(28, "disk full")

    told: dict[str, str] = {}
    with manager(path, backend=Script(before=before).store) as saving:
        run = Run().train()
        step = iter(range(1, 100))

        def good() -> None:
            fail.clear()
            number = next(step)
            assert saving.save(number, run.state(), wait=True).result().endswith(f"-{number}")

        good()
        fail.set()
        future = saving.save(50, run.state())
        told["future"] = raised(future.result)
        told["next save"] = raised(lambda: saving.save(51, run.state()))
        good()
        saving.wait()  # it was raised once
        fail.set()
        saving.save(52, run.state())
        told["wait"] = raised(saving.wait)
        saving.wait()
        told["blocking"] = raised(lambda: saving.save(53, run.state(), wait=True))
        good()
        state = {**run.state(), "bad": _Fails() if rank else 1}
        told["staging"] = raised(lambda: saving.save(54, state))
        told["staging, blocking"] = raised(lambda: saving.save(54, state, wait=True))
        good()
        told["steps"] = raised(lambda: saving.save(55 + rank, run.state()))
        told["state"] = raised(lambda: saving.save(55, [] if rank else run.state()))
        told["number"] = raised(lambda: saving.save(-1 if rank else 55, run.state()))
        told["asked"] = raised(lambda: saving.restore(run.state(), step=rank))
        good()
        fail.set()
        saving.save(56, run.state())
        told["close"] = raised(saving.close)
        saving.close()
        told["closed"] = raised(lambda: saving.save(57, run.state()))
        told["closed, restore"] = raised(lambda: saving.restore(run.state()))
    dist.barrier()
    assert _names(path) == ["step-3", "step-4", "step-5"]
    return told


def test_errors_reach_every_rank_once_and_leave_nothing(tmp_path: Path) -> None:
    for rank, told in enumerate(run_ranks(_errors, 2, str(tmp_path))):
        for name in ("future", "next save", "wait", "blocking", "close"):
            assert told[name].startswith("CheckpointException"), (rank, name, told[name])
            assert "disk full" in told[name]
        for name in ("staging", "staging, blocking"):
            assert "no state now" in told[name]
            assert told[name].startswith("RuntimeError" if rank else "StorageError: save(54)")
        assert told["steps"].startswith("ValueError") or "same step" in told["steps"]
        assert "expected the same step on every rank, found 0 to 1" in told["asked"]
        assert ("found list" in told["state"]) and ("found -1" in told["number"])
        assert "was closed" in told["closed"] and "was closed" in told["closed, restore"]


def _leaves(rank: int, world: int, path: str) -> tuple[str, float]:
    """Rank 0 goes, and keeps the errors that it has seen; its process stays."""
    begin = time.monotonic()
    with manager(path) as saving:
        run = Run().train()
        fails = run.state() | {"x": torch.empty(3, device="meta")}
        kept = []
        for step in (1, 2, 3):
            try:
                saving.save(step, fails, wait=step == 2).result()
            except CheckpointException as error:
                kept.append(error)
        kept.append(raised(saving.wait))
        told = raised(lambda: saving.restore({"y": torch.ones(3)}))
        if rank == 1:
            told = raised(lambda: saving.save(4, run.state()))
    return told, time.monotonic() - begin


def test_who_leaves_is_not_waited_for(tmp_path: Path) -> None:
    with manager(tmp_path) as alone:
        alone.save(1, {"x": torch.ones(3)}, wait=True)
    found = run_ranks(_leaves, 2, str(tmp_path))
    assert "CheckpointMismatchError" in found[0][0] or "Missing key" in found[0][0], found[0][0]
    assert "have lost each other" in found[1][0] and found[1][1] < 30


def _deadline(rank: int, world: int, path: str) -> list[str]:
    slow = threading.Event()

    def before(operation: str, name: str) -> None:
        if operation in ("write", "put") and slow.is_set():
            time.sleep(0.4)

    told = []
    script = Script(before=before)
    with manager(path, backend=script.store, keep_last=None) as saving:
        run = Run().train()
        assert saving.save(1, run.state(), wait=True, deadline=30).done()
        slow.set()
        told.append(raised(lambda: saving.save(2, run.state(), wait=True, deadline=0.1)))
        dist.barrier()
        assert _names(path) == ["step-1"]
        saving.save(2, run.state())
        told.append(raised(lambda: saving.save(3, run.state(), deadline=0.1)))
        slow.clear()
        future = saving.save(4, run.state(), deadline=30)
        told.append(raised(lambda: saving.save(5, run.state(), deadline=0)))
        future.result(20)
    dist.barrier()
    assert _names(path) == ["step-1", "step-2", "step-4"]
    return told


def test_a_deadline_that_cannot_be_kept_leaves_nothing(tmp_path: Path) -> None:
    for told in run_ranks(_deadline, 2, str(tmp_path)):
        assert "the deadline is over" in told[0], told[0]
        assert "the save before is still under way: the deadline is over" in told[1]
        assert "deadline" in told[2] and "positive" in told[2]


def _preempted(rank: int, world: int, path: str) -> list[Any]:
    previous = signal.getsignal(signal.SIGTERM)
    seen: list[Any] = []
    with CheckpointManager(path, save_every=4, preempt_signals=[signal.SIGTERM, 12]) as saving:
        run = Run()
        for step in range(1, 11):
            run.train()
            if step == 6 and rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            if saving.should_save(step):
                saving.save(step, run.state(), wait=saving.preempted, deadline=30)
                seen.append((step, saving.preempted, saving.should_save(step)))
            seen.append(saving.preempted)
            if step == 7:
                break
        seen.append(raised(lambda: saving.should_save(8)))
        if rank == 1:  # a second one is the previous handler's
            signal.signal(signal.SIGTERM, lambda *_: seen.append("replaced"))
            os.kill(os.getpid(), signal.SIGTERM)
            assert seen.pop() == "replaced"
            signal.signal(signal.SIGTERM, previous)
    assert signal.getsignal(signal.SIGTERM) == previous
    return seen


def test_preemption_is_agreed_at_one_step(tmp_path: Path) -> None:
    expected = [False] * 3 + [(4, False, False), False, False, (6, True, False), True, True]
    for seen in run_ranks(_preempted, 2, str(tmp_path)):
        assert seen == [*expected, "nothing"]
    assert _names(str(tmp_path)) == ["step-4", "step-6"]


def _asked_apart(rank: int, world: int, path: str) -> str:
    with CheckpointManager(path) as saving:
        return raised(lambda: saving.should_save(3 + rank))


def test_ranks_that_ask_about_different_steps(tmp_path: Path) -> None:
    for text in run_ranks(_asked_apart, 2, str(tmp_path)):
        assert (
            text == "ValueError: should_save(3): expected the same step on every rank, found 3 to 4"
            or "should_save(4)" in text
        )


def test_the_second_signal_goes_to_the_handler_before(tmp_path: Path) -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, _: came.append(number))
    try:
        with CheckpointManager(tmp_path, preempt_signals=[signal.SIGUSR2]) as alone:
            os.kill(os.getpid(), signal.SIGUSR2)
            assert not came and not alone.preempted
            assert alone.should_save(1) and alone.preempted and alone.should_save(2)
            alone.save(2, {"x": 1})
            assert not alone.should_save(2) and not alone.should_save(3)
            os.kill(os.getpid(), signal.SIGUSR2)
            assert came == [signal.SIGUSR2]
            os.kill(os.getpid(), signal.SIGUSR2)
            assert len(came) == 2
        assert signal.getsignal(signal.SIGUSR2) is not before
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_children_can_be_ended(tmp_path: Path) -> None:
    """A forked process has the handler too, and is not what is preempted."""
    with CheckpointManager(tmp_path):
        child = os.fork()
        if child == 0:
            time.sleep(20)
            os._exit(0)
        time.sleep(0.1)
        os.kill(child, signal.SIGTERM)
        begin = time.monotonic()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        assert time.monotonic() - begin < 5


def test_signals_outside_of_the_main_thread(tmp_path: Path) -> None:
    told: list[str] = []
    thread = threading.Thread(target=lambda: told.append(raised(lambda: CheckpointManager("x"))))
    thread.start()
    thread.join()
    assert "preempt_signals=()" in told[0] and "SIGTERM" in told[0]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"keep_last": 0}, "keep_last to be 1 at least"),
        ({"keep_every": 1.5}, "keep_every to be a whole number"),
        ({"save_every": True}, "save_every to be a whole number"),
        ({"async_save": "no"}, "async_save to be True or False"),
        ({"writer_options": {"part": 1}}, "part"),
        ({"reader_options": {"verfy": 1}}, "verfy"),
        ({"local": "s3://bucket/x"}, "expected local to be a path"),
        ({"local": "same"}, "expected local to be a path, other than url"),
        ({"url": 5}, "path or URL"),
        ({"preempt_signals": [999]}, "999"),
    ],
)
def test_arguments(options: dict[str, Any], error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        CheckpointManager(**{"url": "same", "preempt_signals": (), **options})


# ------------------------------------------------------------------------- retention


@pytest.mark.parametrize(
    ("last", "every", "committed", "newest", "damaged", "gone"),
    [
        (3, None, [1, 2, 3, 4, 5], 5, [], [1, 2]),
        (1, None, [1, 2, 3], 3, [], [1, 2]),
        (5, None, [1, 2, 3], 3, [], []),
        (None, None, [1, 2, 3], 3, [2], []),
        (1, 2, [1, 2, 3, 4, 5], 5, [], [1, 3]),
        (2, None, [1, 2, 3, 4], 4, [3], [1, 3]),  # a damaged one is none of the two
        (1, 2, [2, 4, 5], 5, [4], [4]),
        (2, None, [1, 2, 3, 8, 9], 3, [], [1]),  # 8 and 9 are of another timeline
        (2, None, [1, 2, 3, 8, 9], 3, [9], [1]),
        (1, None, [7], 7, [], []),
        (1, 5, [0, 5, 10, 11], 11, [], []),
    ],
)
def test_what_is_obsolete(
    last: int, every: int, committed: list[int], newest: int, damaged: list[int], gone: list[int]
) -> None:
    assert Retention(last, every).obsolete(committed, newest, damaged) == gone


def _retained(rank: int, world: int, path: str) -> None:
    with manager(path, keep_last=2, keep_every=4) as saving:
        run = Run(seed=3)
        assert run.restored(saving) == 3  # 5 is damaged, and stays for now
        for step in (4, 5, 6, 7, 8, 9):
            saving.save(step, run.state())
        saving.wait()


def test_retention_debris_and_damaged_ones(tmp_path: Path) -> None:
    with manager(tmp_path, keep_last=None) as alone:
        run = Run()
        for step in (2, 3, 5):
            alone.save(step, run.state(), wait=True)
    damage(tmp_path / "step-5", "flip")
    for name in ("step-1", "step-7", "step-99", "step-0"):  # of killed saves
        (tmp_path / name).mkdir()
        (tmp_path / name / f"__0_0_{'ab' * 16}.distcp").write_bytes(b"x" * 10)
    (tmp_path / "step-0" / "notes.txt").write_text("mine")
    (tmp_path / "step-08").mkdir()
    (tmp_path / "other").mkdir()
    run_ranks(_retained, 2, str(tmp_path))
    assert _names(str(tmp_path)) == [
        "other", "step-0", "step-08", "step-4", "step-8", "step-9", "step-99",
    ]  # fmt: skip
    assert [p.name for p in (tmp_path / "step-0").iterdir()] == ["notes.txt"]
    assert len(list((tmp_path / "step-99").iterdir())) == 1
    with manager(tmp_path) as alone:
        assert alone.steps() == [4, 8, 9]


def test_metadata_goes_first_and_errors_are_warnings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def before(operation: str, name: str) -> None:
        if operation == "delete" and name.endswith(".distcp"):
            raise PermissionError(13, "not yours")

    script = Script(before=before)
    with manager(tmp_path, keep_last=1, backend=script.store) as alone:
        for step in (1, 2):
            alone.save(step, Run().state())
        alone.wait()
        assert alone.steps() == [2]
        assert [p.suffix for p in (tmp_path / "step-1").iterdir()] == [".distcp"]
    assert "remove what is not to be kept: failed" in caplog.text
    with manager(tmp_path, keep_last=1) as alone:
        alone.save(3, Run().state(), wait=True)
        alone.wait()
        assert _names(str(tmp_path)) == ["step-3"]


def test_shares() -> None:
    files = {f"f{i}": size for i, size in enumerate([100, 90, 30, 30, 20, 0])}
    found = shares(files, 3)
    assert {name: size for share in found for name, size in share.items()} == files
    assert sorted(sum(share.values()) for share in found) == [80, 90, 100]
    assert shares({}, 2) == [{}, {}]


def test_repr_and_storage_error_without_bucket(tmp_path: Path) -> None:
    with manager("s3://key:secret@bucket/run", save_every=5) as alone:
        text = repr(alone)
        assert "secret" not in text and "keep_last=3" in text and "ranks=1" in text
    with manager(tmp_path / "file") as alone:
        (tmp_path / "file").write_text("x")
        with pytest.raises(StorageError, match="is a file"):
            alone.steps()


def _differ(rank: int, world: int, path: str) -> list[str]:
    told = [
        raised(lambda: manager(f"{path}/{rank}")),
        raised(lambda: manager(path, save_every=5 + rank)),
        raised(lambda: CheckpointManager(path, preempt_signals=[10] if rank else ())),
    ]
    with manager(path) as saving:
        saving.save(1, {"x": 1}, wait=True)
    return told


def test_ranks_that_make_different_managers(tmp_path: Path) -> None:
    for told in run_ranks(_differ, 2, str(tmp_path)):
        for text in told:
            assert text.startswith("ValueError: expected every rank to make the same"), text
        assert f"{tmp_path}/0" in told[0] and f"rank 1: CheckpointManager('{tmp_path}/1'" in told[0]
        assert "save_every=6" in told[1] and "SIGUSR1" in told[2]


def _parts(rank: int, world: int, path: str) -> list[Any]:
    """Ranks 0 and 2 of three have managers, one after the other; rank 1 knows nothing of them."""
    group = dist.new_group([0, 2])
    told: list[Any] = []
    if rank == 1:
        told.append(raised(lambda: manager(path, process_group=group)))
    else:
        for step in (1, 2):
            with manager(path, process_group=group) as saving:
                state = {f"x{rank}": torch.full((3,), float(rank)), "same": 5}
                told.append(saving.restore(dict(state)))
                told.append(saving.save(step, state).result(20))
                told.append(repr(saving).count("ranks=2"))
    dist.barrier()
    return told


@needs_groups_without_rank_0
def test_a_part_of_the_ranks(tmp_path: Path) -> None:
    found = run_ranks(_parts, 3, str(tmp_path))
    expected = [None, f"{tmp_path}/step-1", 1, 1, f"{tmp_path}/step-2", 1]
    assert found[0] == found[2] == expected
    assert "that this rank is in" in found[1][0]


def _planned_once(rank: int, world: int, path: str) -> list[Any]:
    names = []
    with manager(path) as saving:
        run = Run()
        for _ in range(3):
            run.train()
            saving.save(run.step, run.state(), wait=run.step == 3).result()
            plans = saving._saver._planner._plans
            names.append(plans.name if rank == 0 and plans is not None else None)
        other = Run(seed=5)
        assert other.restored(saving) == 3 and digest(other) == digest(run)
    return names


def test_what_is_saved_again_is_planned_once(tmp_path: Path) -> None:
    names = run_ranks(_planned_once, 2, str(tmp_path))[0]
    assert names[0] is not None and names[1] == names[2]


def test_many_saves_leave_nothing_behind(tmp_path: Path) -> None:
    def counts() -> tuple[int, int]:
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

    with manager(tmp_path, keep_last=2) as alone:
        run = Run()
        for step in range(30):
            alone.save(step, run.state())
            if step == 5:
                alone.wait()
                after_some = counts()
        alone.wait()
        assert all(now <= then for now, then in zip(counts(), after_some, strict=True))
        assert len(alone._saver._stager._blocks) == 1  # used again by each save
    assert _names(str(tmp_path)) == ["step-28", "step-29"]
