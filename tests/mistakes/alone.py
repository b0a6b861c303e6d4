"""What all ranks have to call, called by some: the others are named in the log while it hangs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from dcp_fsdp_osd import (
    FlatOptimLoadPlanner,
    FlatOptimSavePlanner,
    StreamingWriter,
    verify_model_state,
)
from dcp_fsdp_osd.misuse import waiting
from tests.mistakes.case import Bench, mistake
from tests.models import Mlp
from tests.planners.checks import make

TIMEOUT = 4.0  # of the process group, seconds: how long these hang


@contextlib.contextmanager
def soon(period: float = 0.1) -> Iterator[None]:
    """The ranks that wait say so after a fraction of a second, in signs `period` seconds apart."""
    before = waiting.AFTER, waiting.PERIOD
    waiting.AFTER, waiting.PERIOD = 0.2, period
    try:
        yield
    finally:
        waiting.AFTER, waiting.PERIOD = before


def _group() -> Any:
    return dist.new_group(timeout=timedelta(seconds=TIMEOUT))


@mistake(
    "dcp.save on rank 0 alone, to StreamingWriter",
    raises="RuntimeError",
    says=r"rank 0 has waited \d+ s .* the save to .*/new\. Not heard of: 1, of 2",
    ranks=(0,),
)
def save_on_rank_0_alone(bench: Bench) -> None:
    group = _group()
    if bench.rank == 0:
        state, writer = {"x": torch.ones(3)}, StreamingWriter(bench.path)
        with soon():
            dcp.save(state, storage_writer=writer, process_group=group)


@mistake(
    "dcp.save on rank 0 alone, with our planner and another writer",
    raises="RuntimeError",
    says=r"rank 0 has waited \d+ s .* the save\. Not heard of: 1, of 2",
    ranks=(0,),
)
def save_on_rank_0_alone_to_stock(bench: Bench) -> None:
    group = _group()
    model, optim = make()
    planner = FlatOptimSavePlanner(model, optim)
    if bench.rank == 0:
        state, writer = {"optim": optim.state_dict()}, FileSystemWriter(bench.path)
        with soon():
            dcp.save(state, storage_writer=writer, planner=planner, process_group=group)


@mistake(
    "dcp.load on all ranks but rank 0",
    raises="RuntimeError",
    says=r"rank 1 has waited \d+ s .* the load\. Not heard of: 0, of 2",
    ranks=(1,),
)
def load_without_rank_0(bench: Bench) -> None:
    group = _group()
    model, optim = make()
    planner = FlatOptimLoadPlanner(model, optim)
    if bench.rank == 1:
        reader = FileSystemReader(bench.good)
        with soon():
            dcp.load({"optim": {}}, storage_reader=reader, planner=planner, process_group=group)


@mistake(
    "verify on rank 0 alone",
    raises="RuntimeError",
    says=r"rank 0 has waited \d+ s .* the load from .*/good\. Not heard of: 1, of 2",
    ranks=(0,),
)
def verify_on_rank_0_alone(bench: Bench) -> None:
    group = _group()
    if bench.rank == 0:
        with soon():
            verify_model_state(Mlp(), bench.good, process_group=group)
