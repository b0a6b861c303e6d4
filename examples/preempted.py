"""A worker is killed, the job is preempted, training goes on: ``python -m examples.preempted``.

``torchrun`` starts 4 workers, which train a small transformer under FSDP1 on the Python standard
library's sources, with a ``CheckpointManager``.  In the middle one worker is killed (SIGKILL, as by
the kernel when memory is short), and the job fails.  It is started again on the 3 workers that are
left and resumes from the newest checkpoint.  Later one worker is told that the machine will be
taken away (SIGTERM): all save at the end of that step and stop.  The third job trains to the end.

The losses must be those of a run on 4 ranks that never stopped: to the bit until the first
worker dies, and within ``TOLERANCE`` on 3 ranks, where sums are taken in another order.  Exits
with 1 where they are not.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dcp_fsdp_osd import CheckpointManager, FlatModelState, FlatOptimState
from examples.tiny_lm import Config, Text, Trainer

__all__ = ["TOLERANCE", "judge", "main"]

TOLERANCE = 1e-4
"""Largest relative difference of a loss where sums are taken in another order."""
_STEPS, _SAVE_EVERY, _CRASH_AT, _NOTICE_AT = 30, 5, 13, 21
_CONFIG = Config(width=128, layers=4, rows=12, steps=_STEPS)  # rows: for 4 ranks and for 3
_QUICK = Config(width=32, heads=2, layers=2, context=32, rows=12, steps=_STEPS)
_ROOT = Path(__file__).parent.parent


# ---------------------------------------------------------------------------- a worker


def train(trainer: Trainer, folder: Path, job: str) -> None:
    """Resume and train until the end, or until this job is preempted."""
    rank = dist.get_rank()
    state: dict[str, Any] = {
        "model": FlatModelState(trainer.model),
        "optim": FlatOptimState(trainer.model, trainer.optim),
        "scheduler": trainer.scheduler,
    }
    with (
        CheckpointManager(folder / "run", save_every=_SAVE_EVERY, keep_last=2) as manager,
        (folder / f"{job}-{rank}.jsonl").open("w") as log,
    ):
        trainer.step = manager.restore(state) or 0
        while trainer.step < trainer.config.steps and not manager.preempted:
            [loss] = trainer.train(trainer.step + 1)
            step = trainer.step
            log.write(json.dumps([step, loss]) + "\n")
            log.flush()
            if job == "killed" and step == _CRASH_AT and rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            if job == "preempted" and step == _NOTICE_AT and rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            if manager.should_save(step):
                last = manager.preempted
                manager.save(step, state, wait=last, deadline=25 if last else None)


def _work(folder: Path, job: str, config: Config) -> None:
    # torch warns of its own use of its own deprecated parts, line by line and on each rank.
    warnings.filterwarnings("ignore", module="torch")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    text = Text()
    if job == "killed":  # which has the ranks of the reference
        losses = Trainer(config, text, "fsdp1", seed=1).train(config.steps)
        (folder / "reference.json").write_text(json.dumps(losses))
    # Only the first job may use its own first weights.
    train(Trainer(config, text, "fsdp1", seed=1 if job == "killed" else 2), folder, job)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # torch 2.13's FSDP1 on gloo now and then aborts in the interpreter's own exit


# -------------------------------------------------------------------------- the driver


def _torchrun(folder: Path, job: str, workers: int, quick: bool, limit: float) -> int:
    """The exit code of one job; its output goes to a file."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={workers}", "--max-restarts=0", "-m", "examples.preempted"]
    command += ["--worker", str(folder), "--job", job, *(["--quick"] if quick else [])]
    with (folder / f"{job}.log").open("w") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            env={**os.environ, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"},
        )
        try:
            return process.wait(limit)
        except BaseException:
            process.terminate()  # it ends its workers
            process.wait()
            raise


def _losses(folder: Path, job: str) -> dict[int, float]:
    lines = (folder / f"{job}-0.jsonl").read_text().splitlines()
    return dict(map(json.loads, lines))


def judge(
    reference: list[float], killed: dict[int, float], later: list[dict[int, float]]
) -> tuple[bool, str]:
    """Whether each loss is as expected, and in words."""
    want = dict(enumerate(reference, 1))
    if any(want[step] != loss for step, loss in killed.items()):
        return False, "losses differ before the first worker died"
    got = {step: loss for losses in later for step, loss in losses.items()}
    first = min(got, default=0)
    if not 1 < first <= max(killed) + 1 or sorted(got) != list(range(first, len(want) + 1)):
        return False, f"steps {sorted(got)} after the crash, expected some to {len(want)}"
    if not all(map(math.isfinite, got.values())):
        return False, "losses that are no numbers"
    worst = max(abs(loss - want[step]) / abs(want[step]) for step, loss in got.items())
    return worst <= TOLERANCE, f"losses differ by {worst:.1e} (limit {TOLERANCE:.0e})"


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a much smaller model")
    parser.add_argument("--worker", metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker is not None:
        _work(Path(args.worker), args.job, _QUICK if args.quick else _CONFIG)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="preempted-") as name:
        folder = Path(name)
        jobs = [("killed", 4), ("preempted", 3), ("last", 3)]
        for job, workers in jobs:
            code = _torchrun(folder, job, workers, args.quick, limit=200)
            if (code != 0) is not (job == "killed"):
                print((folder / f"{job}.log").read_text()[-5000:])
                print(f"FAILED: the job {job!r} ended with exit code {code}")
                return 1
            steps = _losses(folder, job)
            print(
                f"{workers} workers: steps {min(steps)} to {max(steps)}, loss "
                f"{steps[min(steps)]:.3f} to {steps[max(steps)]:.3f}; "
                f"{'one was killed' if job == 'killed' else 'ended' if job == 'last' else 'saved'}"
            )
        reference = json.loads((folder / "reference.json").read_text())
        killed, *later = [_losses(folder, job) for job, _ in jobs]
        good, words = judge(reference, killed, later)
        if max(later[0]) != _NOTICE_AT or min(later[1]) != _NOTICE_AT + 1:
            good, words = False, f"preempted at {_NOTICE_AT}, stopped at {max(later[0])}"
        checkpoints = sorted(path.name for path in (folder / "run").iterdir())
    print(f"Left: {', '.join(checkpoints)}")
    print(f"{'As expected' if good else 'FAILED'}: {words}; {time.monotonic() - began:.0f} s.")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
