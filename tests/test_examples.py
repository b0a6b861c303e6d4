"""The examples run, their comparisons hold, and the comparisons are able to fail."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.s3_server import S3Endpoint, s3_server
from examples import (
    async_preemption,
    export,
    fine_tune,
    migrate_fsdp1_to_fsdp2,
    preempted,
    s3_streaming,
)
from examples.tiny_lm import Config, Text
from examples.train_resume import RUNS, TOLERANCE, Run, judge
from tests.ranks import mesh, run_ranks
from tests.torch_gaps import AVERAGES_ON_CPU, lacks

_ROOT = Path(__file__).parent.parent


def _family(pid: int) -> list[int]:
    """A process and its descendants; torchrun's workers lead sessions of their own."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found


def _run(*command: str, limit: float) -> subprocess.CompletedProcess[str]:
    """Run to its end, or kill it with all its descendants at ``limit`` seconds."""
    process = subprocess.Popen(
        command,
        cwd=_ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
    )
    try:
        output, _ = process.communicate(timeout=limit)
    finally:
        for pid in _family(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
    return subprocess.CompletedProcess(command, process.returncode, output)


@lacks(not AVERAGES_ON_CPU, "FSDP2 on CPU (gloo sums gradients for their mean)")
def test_train_resume_quick(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    module = "examples.train_resume"
    done = _run(sys.executable, "-m", module, "--quick", "--json", str(results), limit=240)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("equal to the bit") == 2
    document = json.loads(results.read_text())
    runs = document["runs"]
    assert [(r["kind"], r["place"], len(r["ranks"])) for r in runs] == [
        (run.kind, run.place, run.ranks) for run in RUNS
    ]
    want = document["reference"][0]["losses"]
    assert len(want) == 4 and all(0 < loss < 7 for loss in want)
    for run in runs:
        same = run["ranks"][0]["losses"] == want
        assert same if run["expect"] == "bits" else (not same or run["expect"] == "close")
        assert sum(rank["read"] for rank in run["ranks"]) > 0
    for rank in document["reference"]:
        for name, cost in rank["costs"].items():
            if name.endswith("ours"):  # nothing but barriers leaves a rank
                assert cost["between"] < 4096, name
            else:
                assert cost["between"] > rank["state_bytes"], name


def _running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_the_limit_leaves_no_process() -> None:
    program = """if True:
        import subprocess, sys
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        print(child.pid, flush=True)
        child.wait()
    """
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        _run(sys.executable, "-c", program, limit=3)
    output = caught.value.output
    child = int(output.decode() if isinstance(output, bytes) else output)
    deadline = time.monotonic() + 10
    while _running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _running(child)


# FSDP1 on gloo now and then aborts while the process exits, after its last line (torch 2.13;
# a script with nothing of ours does too).
_ABORT_AT_EXIT = "terminate called without an active exception"


@pytest.mark.slow  # torchrun is started three times
def test_preempted_quick() -> None:
    done = _run(sys.executable, "-m", "examples.preempted", "--quick", limit=240)
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines[:3]] == ["4 workers", *["3 workers"] * 2]
    assert "steps 1 to 13" in lines[0] and "steps 22 to 30" in lines[2]
    assert lines[3] == "Left: step-25, step-30"


@pytest.mark.parametrize(
    ("killed", "later", "good"),
    [
        ({1: 3.0, 2: 2.5}, [{2: 2.5, 3: 2.0}, {4: 1.5}], True),
        ({1: 3.0, 2: 2.5}, [{2: 2.5 * (1 + TOLERANCE / 2), 3: 2.0}, {4: 1.5}], True),
        ({1: 3.0, 2: 2.5}, [{2: 2.5, 3: 2.0 * (1 + 2 * TOLERANCE)}, {4: 1.5}], False),
        ({1: 3.0, 2: 2.5}, [{2: 2.5, 3: float("nan")}, {4: 1.5}], False),
        ({1: 3.0, 2: 2.5 + 1e-12}, [{2: 2.5, 3: 2.0}, {4: 1.5}], False),
        ({1: 3.0, 2: 2.5}, [{2: 2.5}, {4: 1.5}], False),
        ({1: 3.0, 2: 2.5}, [{1: 3.0, 2: 2.5, 3: 2.0}, {4: 1.5}], False),  # nothing was restored
        ({1: 3.0}, [{3: 2.0}, {4: 1.5}], False),
        ({1: 3.0, 2: 2.5}, [{}, {}], False),
    ],
)
def test_the_judge_of_preempted(
    killed: dict[int, float], later: list[dict[int, float]], good: bool
) -> None:
    assert preempted.judge([3.0, 2.5, 2.0, 1.5], killed, later)[0] is good


def _ranks(losses: list[float], digest: int = 1) -> list[dict[str, Any]]:
    return [{"losses": losses, "digest": digest} for _ in range(2)]


@pytest.mark.parametrize(
    ("losses", "digest", "bits", "close", "differs"),
    [
        ([3.0, 2.0], 1, True, True, False),
        ([3.0, 2.0], 2, False, True, False),
        ([3.0, 2.0000000001], 1, False, True, False),
        ([3.0, 2.0 * (1 + 2 * TOLERANCE)], 1, False, False, True),
        ([3.0, float("nan")], 1, False, False, False),
        ([3.0], 1, False, False, False),
    ],
)
def test_the_judge_can_say_no(
    losses: list[float], digest: int, bits: bool, close: bool, differs: bool
) -> None:
    reference = _ranks([3.0, 2.0])
    run = Run("fsdp1", "disk", 2, "bits")
    got = _ranks(losses, digest)
    assert judge(run, got, reference)[0] is bits
    assert judge(replace(run, expect="close"), got, reference)[0] is close
    assert judge(replace(run, expect="differs"), got, reference)[0] is differs


def test_data_is_a_function_of_the_step() -> None:
    config, text = Config(), Text()
    batch = text.batch(5, config)
    torch.rand(7)
    assert torch.equal(batch, Text().batch(5, config))
    assert not torch.equal(batch, text.batch(6, config))
    assert batch.shape == (config.rows, config.context + 1)
    assert all(config.rows % world == 0 for world in (2, 4))


def _migrate(rank: int, world: int, folder: str) -> tuple[list[float], list[float]]:
    return migrate_fsdp1_to_fsdp2.main(folder, mesh=mesh(world))


def _programs(rank: int, world: int, folder: Path, s3: S3Endpoint) -> dict[str, Any]:
    """All of the small programs in one call."""

    def strike(step: int) -> None:
        if (rank, step) == (1, 7):
            os.kill(os.getpid(), signal.SIGTERM)

    (folder / "export").mkdir(exist_ok=True)
    (folder / "tune").mkdir(exist_ok=True)
    return {
        "loaded": s3_streaming.main(s3.url("run"), s3.storage_options, width=64),
        "all": async_preemption.main(f"{folder}/whole", 12),
        "first": async_preemption.main(f"{folder}/struck", 12, strike),
        "then": async_preemption.main(f"{folder}/struck", 12),
        "export": export.main(folder / "export"),
        "tune": fine_tune.main(f"{folder}/tune"),
    }


def test_small_programs(tmp_path: Path) -> None:
    with s3_server() as s3:
        ranks = run_ranks(_programs, 2, tmp_path, s3, timeout=120)
    for found in ranks:
        assert found["loaded"] == 3
        assert found["first"] == found["all"][:7]  # it stopped in the step of the signal
        assert found["first"] + found["then"] == found["all"] and len(found["all"]) == 12
        tuned = found["tune"]
        assert tuned["resumed"] == tuned["losses"] and len(set(tuned["losses"])) == 3
        new = {"classifier.weight", "classifier.bias"}
        assert tuned["changed"] - {"head.weight", "head.bias"} == new
        assert {line.split(":")[0] for line in tuned["skipped"]} >= new
    assert sorted(each.name for each in (tmp_path / "struck").iterdir()) == ["step-10", "step-7"]
    outputs = ranks[0]["export"]
    assert torch.equal(outputs["fsdp"], outputs["plain"])
    whole = torch.load(tmp_path / "export/all.pt", weights_only=True)
    tensors = load_file(tmp_path / "export/model.safetensors")
    assert tensors.keys() == whole["model"].keys() == export.layers().state_dict().keys()
    assert all(torch.equal(tensor, whole["model"][name]) for name, tensor in tensors.items())


@lacks(not AVERAGES_ON_CPU, "FSDP2 on CPU (gloo sums gradients for their mean)")
def test_losses_go_on_to_the_bit_from_fsdp1_to_fsdp2(tmp_path: Path) -> None:
    for before, after in run_ranks(_migrate, 2, str(tmp_path)):
        assert before == after and len(set(before)) == 3


_PROGRAMS = {
    "async_preemption.py": "steps 1 to 12 of 12",
    "export.py": "outputs equal",
    "fine_tune.py": "resumed",
    "migrate_fsdp1_to_fsdp2.py": ": equal",
    "s3_streaming.py": "/step-3 through",
}


@pytest.mark.slow  # each starts torchrun
@pytest.mark.parametrize("program", _PROGRAMS)
def test_small_programs_under_torchrun(program: str, tmp_path: Path) -> None:
    if program == "migrate_fsdp1_to_fsdp2.py" and not AVERAGES_ON_CPU:
        pytest.skip("FSDP2 on CPU")
    options = [str(tmp_path)] if program in ("async_preemption.py", "s3_streaming.py") else []
    options += ["--steps", "12"] if program == "async_preemption.py" else []
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = _run(sys.executable, *torchrun, f"examples/{program}", *options, limit=120)
    assert _PROGRAMS[program] in done.stdout, done.stdout
    assert done.returncode == 0 or _ABORT_AT_EXIT in done.stdout, done.stdout
