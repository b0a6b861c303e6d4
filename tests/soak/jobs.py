"""What the ranks of a round run."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import (
    FullStateDictConfig,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from dcp_fsdp_osd import (
    CheckpointManager,
    FlatModelState,
    FlatOptimLoadPlanner,
    FlatOptimSavePlanner,
    FlatOptimState,
    RetryPolicy,
    StorageError,
    StreamingReader,
    StreamingWriter,
)
from tests.models import full_state
from tests.random_jobs import build, releasing, train
from tests.soak.rounds import Round, Strike
from tests.soak.striking import striking
from tests.torch_gaps import async_save

__all__ = ["RETRY", "Digest", "load", "manage", "save", "save_by_process", "state_digest"]

Digest = dict[str, str]
RETRY = RetryPolicy(tries=5, seconds=6.0, first=0.02, longest=0.3)
NOTHING = Strike("", -1, call=0)
_FIRST = 2
"""Steps that are trained before the first save."""
ERRORS = (Exception, CheckpointException)


def state_digest(key: str, value: Any) -> str:
    """What is compared of a value: bits, shape and dtype; of a step counter its number."""
    if key.endswith(".step"):
        return str(float(value))
    if not isinstance(value, torch.Tensor):
        return repr(value)
    raw = value.detach().cpu().contiguous().reshape(-1)
    data = raw.view(torch.uint8).numpy().tobytes() if raw.numel() else b""
    return f"{value.dtype} {tuple(value.shape)} {hashlib.sha1(data).hexdigest()}"


def _digest(model: FSDP, optim: torch.optim.Optimizer, *, weights: bool) -> Digest:
    """Of the whole state, by stock's gather."""
    full = full_state(model, optim)
    found = {
        f"optim.state.{fqn}.{name}": state_digest(f".{name}", value)
        for fqn, values in full["state"].items()
        for name, value in values.items()
    }
    for group in full["param_groups"]:
        options = {name: value for name, value in group.items() if name != "params"}
        found.update({f"options.{fqn}": repr(sorted(options.items())) for fqn in group["params"]})
    if weights:
        config = FullStateDictConfig(offload_to_cpu=False, rank0_only=False)
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
            values = copy.deepcopy(model.state_dict())
        found.update({f"model.{name}": state_digest("", value) for name, value in values.items()})
    return found


def _state(round_: Round, model: FSDP, optim: torch.optim.Optimizer) -> dict[str, Any]:
    if round_.statefuls:
        return {"model": FlatModelState(model), "optim": FlatOptimState(model, optim)}
    return {"optim": optim.state_dict()}


@releasing
def save(
    rank: int,
    world: int,
    round_: Round,
    options: dict[str, Any],
    version: int = 0,
    strike: Strike = NOTHING,
    overwrite: bool = False,
) -> list[Digest]:
    """Train, and save `version`: what it is, and what the version after it would be."""
    job = round_.job
    model, optim = build(job, job.source, seed=1)
    train(model, optim, _FIRST + version)
    digests = [_digest(model, optim, weights=round_.statefuls)]
    url, planner = options["url"], None
    dist.barrier()
    with striking(rank, strike, _storage(round_, options)) as storage:
        writer: Any = dcp.FileSystemWriter(url)
        if job.streaming:
            writer = StreamingWriter(url, overwrite=overwrite, **storage)
        state: dict[str, Any]
        if job.source.by == "stock":
            state = {"optim": get_optimizer_state_dict(model, optim)}
        else:
            planner = FlatOptimSavePlanner(*(() if round_.statefuls else (model, optim)))
            state = _state(round_, model, optim)
        dcp.save(state, storage_writer=writer, planner=planner)
    if strike.what != "kill" or strike.counts:
        after = _digest(model, optim, weights=round_.statefuls)
        if after != digests[0]:
            raise AssertionError("a save changed what it saved")
        train(model, optim, 1)
        digests.append(_digest(model, optim, weights=round_.statefuls))
    return digests


@releasing
def load(
    rank: int, world: int, round_: Round, options: dict[str, Any], strike: Strike = NOTHING
) -> Digest:
    """Load into a model of another make, and be able to train on."""
    job = round_.job
    model, optim = build(job, job.target, seed=9)
    if job.live and job.target.by == "ours":
        train(model, optim, 1)
    dist.barrier()
    with striking(rank, strike, _storage(round_, options)) as storage:
        url = options["url"]
        reader: Any = dcp.FileSystemReader(url)
        if job.streaming:
            reader = StreamingReader(url, **storage)
        state: dict[str, Any]
        if job.target.by == "stock":
            state = {"optim": get_optimizer_state_dict(model, optim)}
            dcp.load(state, storage_reader=reader)
            set_optimizer_state_dict(model, optim, state["optim"])
        else:
            stall = round_.options["stall_seconds"]
            about = {"broadcast": round_.broadcast, "stall_seconds": stall}
            if round_.statefuls:
                state = _state(round_, model, optim)
                planner = FlatOptimLoadPlanner(**about)
            else:
                state = {"optim": optim.state_dict() if job.live else {}}
                planner = FlatOptimLoadPlanner(model, optim, **about)
            dcp.load(state, storage_reader=reader, planner=planner)
            if not round_.statefuls:
                optim.load_state_dict(state["optim"])
    found = _digest(model, optim, weights=round_.statefuls)
    train(model, optim, 1)
    return found


def _storage(round_: Round, options: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a writer or reader."""
    given = {key: value for key, value in options.items() if key != "url"}
    return {**given, **round_.options, "retry": RETRY}


# ------------------------------------------------------------- a managed run


@releasing
def manage(
    rank: int,
    world: int,
    round_: Round,
    options: dict[str, Any],
    last: int,
    strike: Strike = NOTHING,
    target: bool = False,
) -> dict[str, Any]:
    """Restore what there is and train to step `last`, with a save beside training every other step.

    Returns the step that was restored, digests by step, steps that are there at the end, and saves
    that raised.  With `target`, the layout is that of the other side.
    """
    job = round_.job
    with_weights: Any = {"weights": True}
    side = job.target if target else job.source
    model, optim = build(job, side, seed=9 if target else 1)
    state: dict[str, Any] = {
        "model": FlatModelState(model),
        "optim": FlatOptimState(model, optim),
        "step": 0,
    }
    digests: dict[int, Digest] = {}
    failed: list[int] = []
    given = _storage(round_, options)
    about = {name: given.pop(name) for name in ("concurrency", "max_inflight_bytes")}
    dist.barrier()
    with (
        striking(rank, strike, given) as storage,
        CheckpointManager(
            options["url"],
            keep_last=2,
            async_save=round_.seed % 3 != 0,
            preempt_signals=(),
            writer_options=about,
            reader_options=about,
            **storage,
        ) as manager,
    ):
        restored = manager.restore(state)
        if restored is not None:
            digests[restored] = _digest(model, optim, **with_weights)
        for step in range(1 + (restored or 0), last + 1):
            train(model, optim, 1)
            if step % 2 == 0:
                digests[step] = _digest(model, optim, **with_weights)
                state["step"] = step
                with _noted(failed, step):
                    manager.save(step, state)
        with _noted(failed, last):
            manager.wait()
        there = manager.steps() if strike.counts or not strike.what else []
    return {"restored": restored, "digests": digests, "steps": there, "failed": failed}


@contextlib.contextmanager
def _noted(failed: list[int], step: int) -> Iterator[None]:
    """Training goes on after a save that failed, as the manager's docstring allows."""
    try:
        yield
    except (CheckpointException, StorageError):
        failed.append(step)


# ------------------------------------------------------ async_save in a process


@releasing
def save_by_process(
    rank: int, world: int, round_: Round, options: dict[str, Any], at: float
) -> str:
    """Save version 0 twice and then version 1 by a process, which is killed when the share `at` of
    the time of a save is over; what that raised."""
    job = round_.job
    model, optim = build(job, job.source, seed=1)
    train(model, optim, _FIRST)
    group = dist.new_group(backend="gloo")

    def saving() -> Any:
        return async_save(
            {"optim": FlatOptimState(model, optim)},
            kind="process",
            storage_writer=StreamingWriter(
                options["url"], overwrite=True, **_storage(round_, options)
            ),
            planner=FlatOptimSavePlanner(),
            process_group=group,
        )

    saving().result()  # with the start of the process
    begin = time.monotonic()
    saving().result()
    seconds = time.monotonic() - begin
    train(model, optim, 1)
    under_way = saving()
    time.sleep(at * seconds)
    if rank == round_.strike.victim % world:
        for pid in _children():
            os.kill(pid, signal.SIGKILL)
    try:
        under_way.result()
    except ERRORS as error:
        return type(error).__name__
    return ""


def _children() -> list[int]:
    return [
        int(pid)
        for task in Path("/proc/self/task").iterdir()
        for pid in (task / "children").read_text().split()
        if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
