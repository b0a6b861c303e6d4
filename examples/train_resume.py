"""Train, save, resume on other ranks, compare: ``python -m examples.train_resume [--quick]``.

A small transformer learns the Python standard library's sources under FSDP1 on 4 ranks.  In
the middle everything (weights, AdamW, schedule, step) is saved with one ``dcp.save``, from each
rank's own memory, to disk and to an S3 server that runs for the occasion; training goes on to the
end as the reference.  Then new processes resume from either place: on 4 ranks, where losses,
weights and optimizer state must equal the reference to the bit; on 2 ranks and under FSDP2 (by
PyTorch's own ``set_model_state_dict`` and ``set_optimizer_state_dict``), where sums are taken in
another order, so that losses must agree within ``TOLERANCE``.  As a control, one run resumes
without the optimizer state and must differ.

Also shown: what saving and loading the optimizer cost here and in PyTorch's own way; bytes
between ranks are counted at the sockets.  Exits with 1 where a comparison fails.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
import warnings
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from benchmarks.measure import median, table
from benchmarks.s3_server import s3_server
from benchmarks.wire import WireBytes
from dcp_fsdp_osd import (
    FlatModelState,
    FlatOptimLoadPlanner,
    FlatOptimSavePlanner,
    FlatOptimState,
    StreamingReader,
    StreamingWriter,
)
from examples.optimizer_costs import optimizer_costs
from examples.tiny_lm import Config, Text, Trainer

__all__ = ["TOLERANCE", "Run", "judge", "main"]

TOLERANCE = 1e-4
"""Largest relative difference of a loss where sums are taken in another order."""
_MIB = 1 << 20
_IMPORTED_ONCE = [
    "dcp_fsdp_osd",
    "examples.tiny_lm",
    "s3fs",
    "torch._dynamo",
    "torch.distributed.fsdp",
]
"""By the process that ranks are forked from."""
_QUICK = Config(width=32, heads=2, layers=2, context=32, rows=4, steps=8, save_at=4)


@dataclass(frozen=True)
class Place:
    """Where a checkpoint is: ``options`` are those of the storage's client."""

    name: str
    url: str
    options: dict[str, Any] | None = None


@dataclass(frozen=True)
class Run:
    """One resumed run to make, and how it is judged: ``"bits"``, ``"close"`` or ``"differs"``."""

    kind: str
    place: str
    ranks: int
    expect: str
    optimizer: bool = True


RUNS = (
    Run("fsdp1", "disk", 4, "bits"),
    Run("fsdp1", "S3", 4, "bits"),
    Run("fsdp2", "disk", 4, "close"),
    Run("fsdp1", "disk", 4, "differs", optimizer=False),
    Run("fsdp1", "disk", 2, "close"),
    Run("fsdp1", "S3", 2, "close"),
    Run("fsdp2", "S3", 2, "close"),
)


# ------------------------------------------------------------------- saving and loading


def save(trainer: Trainer, place: Place) -> StreamingWriter:
    """The whole training state in one checkpoint."""
    writer = StreamingWriter(place.url, storage_options=place.options)
    state = {
        "model": FlatModelState(trainer.model),
        "optim": FlatOptimState(trainer.model, trainer.optim),
        "scheduler": trainer.scheduler,
        "step": trainer.step,
    }
    planner = FlatOptimSavePlanner(trainer.model, trainer.optim)
    dcp.save(state, storage_writer=writer, planner=planner)
    return writer


def resume(trainer: Trainer, place: Place, *, optimizer: bool = True) -> StreamingReader:
    """The reverse of :func:`save`, for FSDP1 with our planner and for FSDP2 without."""
    model, optim = trainer.model, trainer.optim
    reader = StreamingReader(place.url, storage_options=place.options)
    state: dict[str, Any] = {"scheduler": trainer.scheduler, "step": 0}
    if isinstance(model, FSDP):
        state["model"] = FlatModelState(model)
        optims = {"optim": optim} if optimizer else {}
        state.update((key, FlatOptimState(model, each)) for key, each in optims.items())
        dcp.load(state, storage_reader=reader, planner=FlatOptimLoadPlanner(model, optims))
    else:
        state["model"] = get_model_state_dict(model)
        state["optim"] = get_optimizer_state_dict(model, optim)
        dcp.load(state, storage_reader=reader)
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optim, state["optim"])
    trainer.step = state["step"]
    return reader


# ------------------------------------------------------------------------- the ranks


def _digest(trainer: Trainer) -> int:
    """One number for this rank's part of the weights and of the optimizer's state."""
    crc = 0
    for parameter in trainer.model.parameters():
        state = trainer.optim.state.get(parameter, {})
        for value in [parameter.detach(), *(state[name] for name in sorted(state))]:
            crc = zlib.crc32(value.reshape(-1).view(torch.uint8).numpy(), crc)
    return crc


def _reference(config: Config, text: Text, places: list[Place], folder: Path) -> dict[str, Any]:
    trainer = Trainer(config, text, "fsdp1", seed=1)
    start = time.perf_counter()
    before = trainer.train(config.save_at)
    step_seconds = (time.perf_counter() - start) / config.save_at
    saved = {}
    for place in places:
        start = time.perf_counter()
        writer = save(trainer, place)
        saved[place.name] = {"seconds": time.perf_counter() - start, "bytes": writer.stats.bytes}
    states = trainer.optim.state.values()
    return {
        "before": before,
        "losses": trainer.train(config.steps),
        "digest": _digest(trainer),
        "step_seconds": step_seconds,
        "saved": saved,
        "costs": optimizer_costs(trainer, folder),
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "state_bytes": sum(value.nbytes for state in states for value in state.values()),
    }


def _resumed(config: Config, text: Text, run: Run, place: Place) -> dict[str, Any]:
    trainer = Trainer(config, text, run.kind, seed=2)  # other weights: all must be loaded
    start = time.perf_counter()
    with WireBytes(ignore=_ports(place)) as wire:
        reader = resume(trainer, place, optimizer=run.optimizer)
    seconds = time.perf_counter() - start
    if trainer.step != config.save_at:
        raise RuntimeError(f"resumed at step {trainer.step}, saved at {config.save_at}")
    return {
        "seconds": seconds,
        "read": reader.stats.bytes,
        "between": wire.tensors,
        "losses": trainer.train(config.steps),
        "digest": _digest(trainer) if run.expect == "bits" else None,
    }


def _ports(place: Place) -> list[int]:
    """The S3 server's port, whose traffic is not between ranks."""
    if place.options is None:
        return []
    return [int(place.options["endpoint_url"].rpartition(":")[2])]


def _rank(rank: int, job: dict[str, Any]) -> None:
    # torch warns of its own use of its own deprecated parts, line by line and on each rank.
    warnings.filterwarnings("ignore", module="torch")
    torch.set_num_threads(1)
    folder, world = Path(job["folder"]), job["world"]
    rendezvous = f"file://{folder}/rendezvous-{job['name']}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world)
    config, text, places = job["config"], Text(), job["places"]
    if job["runs"] is None:
        result: Any = _reference(config, text, places, folder)
    else:
        by_name = {place.name: place for place in places}
        result = [_resumed(config, text, run, by_name[run.place]) for run in job["runs"]]
    (folder / f"{job['name']}-{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # torch 2.13's FSDP1 on gloo now and then aborts in the interpreter's own exit


def _spawn(job: dict[str, Any], timeout: float) -> list[Any]:
    """Run a job on new processes; each rank's result.  None of them is left, whatever happens."""
    mp.set_forkserver_preload(_IMPORTED_ONCE)
    started = mp.start_processes(
        _rank, args=(job,), nprocs=job["world"], join=False, start_method="forkserver"
    )
    deadline = time.monotonic() + timeout
    try:
        while not started.join(timeout=1):  # raises what a rank raised
            if time.monotonic() > deadline:
                raise TimeoutError(f"{job['name']} took more than {timeout:.0f} s")
    finally:
        for process in started.processes:
            process.kill()
            process.join()
    files = [Path(job["folder"]) / f"{job['name']}-{rank}.json" for rank in range(job["world"])]
    return [json.loads(file.read_text()) for file in files]


# ------------------------------------------------------------------------ the report


def judge(
    run: Run, ranks: list[dict[str, Any]], reference: list[dict[str, Any]]
) -> tuple[bool, str]:
    """Is a resumed run as expected, and in words how it compares with the reference."""
    want, got = reference[0]["losses"], ranks[0]["losses"]
    if len(want) != len(got) or not all(map(math.isfinite, want + got)):
        return False, f"{len(got)} losses, expected {len(want)} finite ones"
    worst = max(abs(a - b) / abs(a) for a, b in zip(want, got, strict=True))
    if run.expect == "bits":
        if worst != 0:
            return False, f"losses differ by {worst:.1e}"
        if [rank["digest"] for rank in ranks] != [rank["digest"] for rank in reference]:
            return False, "losses equal, weights or optimizer state differ"
        return True, "equal to the bit: losses, weights, state"
    words = f"losses differ by {worst:.1e}"
    if run.expect == "close":
        return worst <= TOLERANCE, f"{words} (limit {TOLERANCE:.0e})"
    return worst > TOLERANCE, f"{words}, as they must"


def _report_costs(ranks: list[dict[str, Any]]) -> None:
    rows = []
    for name in ranks[0]["costs"]:
        costs = [rank["costs"][name] for rank in ranks]
        rows.append(
            [
                name,
                max(cost["seconds"] for cost in costs),
                max(cost["peak"] for cost in costs) / _MIB,
                sum(cost["between"] for cost in costs) / _MIB,
            ]
        )
    print("\nThe optimizer state alone, on disk, 4 ranks:")
    print(table(rows, header=["", "seconds", "peak MiB a rank", "MiB between ranks"]))


def _report_runs(outcomes: list[tuple[Run, list[dict[str, Any]], bool, str]]) -> None:
    rows = []
    for run, ranks, good, words in outcomes:
        what = run.kind.upper() + ("" if run.optimizer else " without optimizer")
        rows.append(
            [
                what,
                run.ranks,
                run.place,
                max(rank["seconds"] for rank in ranks),
                sum(rank["read"] for rank in ranks) / _MIB,
                sum(rank["between"] for rank in ranks) / _MIB,
                ranks[0]["losses"][-1],
                "ok  " if good else "FAIL",
                words,
            ]
        )
    print("\nResumed in new processes, and compared with the reference:")
    header = ["", "ranks", "from", "seconds", "MiB read", "MiB between", "loss", "", ""]
    print(table(rows, header=header))
    print("(FSDP1 is loaded by us, weights and optimizer in place; FSDP2 by PyTorch alone.)")


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a much smaller model, fewer steps")
    parser.add_argument("--json", metavar="FILE", help="write all results there")
    args = parser.parse_args(argv)
    config = _QUICK if args.quick else Config()
    timeout = 120.0 if args.quick else 300.0
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="train-resume-") as folder, s3_server() as s3:
        places = [
            Place("disk", f"{folder}/step-{config.save_at}"),
            Place("S3", s3.url(f"run/step-{config.save_at}"), s3.storage_options),
        ]
        job = {"folder": folder, "config": config, "places": places}
        text = Text()
        print(f"Text: {text.files} files of Python's standard library, {len(text.bytes):,} bytes")
        reference = _spawn({**job, "name": "reference", "world": 4, "runs": None}, timeout)
        _report_reference(config, reference)
        outcomes = []
        for world in (4, 2):
            runs = [run for run in RUNS if run.ranks == world]
            ranks = _spawn({**job, "name": f"on-{world}", "world": world, "runs": runs}, timeout)
            for run, results in zip(runs, zip(*ranks, strict=True), strict=True):
                outcomes.append((run, list(results), *judge(run, list(results), reference)))
    _report_runs(outcomes)
    good = all(outcome[2] for outcome in outcomes)
    print(f"\n{'All as expected' if good else 'FAILED'}, {time.monotonic() - began:.0f} s.")
    if args.json:
        runs_json = [{**asdict(o[0]), "ok": o[2], "words": o[3], "ranks": o[1]} for o in outcomes]
        Path(args.json).write_text(json.dumps({"reference": reference, "runs": runs_json}))
    return 0 if good else 1


def _report_reference(config: Config, ranks: list[dict[str, Any]]) -> None:
    first = ranks[0]
    state = sum(rank["state_bytes"] for rank in ranks) / _MIB
    count = sum(rank["parameters"] for rank in ranks)
    print(f"Model: {count:,} parameters under FSDP1 on 4 ranks, {state:.1f} MiB of AdamW state")
    print(
        f"Reference: {config.steps} steps of {first['step_seconds']:.2f} s; loss "
        f"{first['before'][0]:.3f} at first, about {median(first['before'][-4:]):.3f} at the save "
        f"in step {config.save_at}, about {median(first['losses'][-4:]):.3f} at the end"
    )
    for name in first["saved"]:
        seconds = max(rank["saved"][name]["seconds"] for rank in ranks)
        size = sum(rank["saved"][name]["bytes"] for rank in ranks) / _MIB
        print(
            f"Saved to {name}: weights, optimizer, schedule, step; {size:.1f} MiB, {seconds:.2f} s"
        )
    _report_costs(ranks)


if __name__ == "__main__":
    sys.exit(main())
