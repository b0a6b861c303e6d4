"""Arguments that are swapped, of the wrong kind, or misspelt."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

from dcp_fsdp_osd import (
    FlatModelState,
    FlatOptimLoadPlanner,
    FlatOptimSavePlanner,
    FlatOptimState,
    FullStateReader,
    StreamingReader,
    StreamingWriter,
    verify_model_state,
    verify_optim_state,
)
from tests.mistakes.case import Bench, mistake
from tests.planners.checks import make

wrong: Any = cast(Any, lambda x: x)  # what a type checker would have told


@mistake("model and optimizer swapped", raises="TypeError", says=r"FlatOptimSavePlanner.*swapped")
def swapped_in_save_planner(bench: Bench) -> None:
    model, optim = make(steps=0)
    FlatOptimSavePlanner(wrong(optim), wrong(model))


@mistake("model and optimizer swapped", raises="TypeError", says=r"FlatOptimLoadPlanner.*swapped")
def swapped_in_load_planner(bench: Bench) -> None:
    model, optim = make(steps=0)
    FlatOptimLoadPlanner(wrong(optim), wrong(model))


@mistake("model and optimizer swapped", raises="TypeError", says=r"FlatOptimState.*swapped")
def swapped_in_optim_state(bench: Bench) -> None:
    model, optim = make(steps=0)
    FlatOptimState(wrong(optim), wrong(model))


@mistake("FlatModelState of an optimizer", raises="TypeError", says=r"FlatModelState.*nn.Module")
def model_state_of_an_optimizer(bench: Bench) -> None:
    FlatModelState(wrong(make(steps=0)[1]))


@mistake("model and optimizer swapped", raises="TypeError", says=r"verify_optim_state.*swapped")
def swapped_in_verify(bench: Bench) -> None:
    model, optim = make(steps=0)
    verify_optim_state(wrong(optim), wrong(model), bench.good)


@mistake(
    "the path first, as in dcp.load", raises="TypeError", says=r"verify_optim_state.*path.*third"
)
def path_first_in_verify(bench: Bench) -> None:
    model, optim = make(steps=0)
    verify_optim_state(wrong(bench.good), wrong(model), wrong(optim))


@mistake("path and model swapped", raises="TypeError", says=r"verify_model_state.*swapped")
def path_first_in_verify_model(bench: Bench) -> None:
    verify_model_state(wrong(bench.good), wrong(make(steps=0)[0]))


@mistake("a writer as the checkpoint to verify", raises="TypeError", says=r"StreamingReader")
def writer_to_verify(bench: Bench) -> None:
    verify_model_state(make(steps=0)[0], wrong(StreamingWriter(bench.good)))


@mistake("a list of optimizers", raises="TypeError", says=r"mapping \{key: optimizer\}.*list")
def list_of_optimizers(bench: Bench) -> None:
    model, optim = make(steps=0)
    FlatOptimSavePlanner(model, wrong([optim, optim]))


@mistake("optim.state_dict() for the optimizer", raises="TypeError", says=r"state dict.*optimizer")
def state_dict_for_optimizer(bench: Bench) -> None:
    model, optim = make()
    FlatOptimSavePlanner(model, wrong(optim.state_dict()))


@mistake("model.state_dict() for the model", raises="TypeError", says=r"state dict.*nn.Module")
def state_dict_for_model(bench: Bench) -> None:
    model, optim = make(steps=0)
    FlatOptimLoadPlanner(wrong(model.state_dict()), optim)


@mistake("a Stateful for the optimizer", raises="TypeError", says=r"FlatOptimState")
def stateful_for_optimizer(bench: Bench) -> None:
    model, optim = make(steps=0)
    FlatOptimSavePlanner(model, wrong(FlatOptimState(model, optim)))


@mistake("an LR scheduler for the optimizer", raises="TypeError", says=r"found .*StepLR")
def scheduler_for_optimizer(bench: Bench) -> None:
    model, optim = make(steps=0)
    FlatOptimSavePlanner(model, wrong(torch.optim.lr_scheduler.StepLR(optim, 1)))


@mistake("the model's class, not a model", raises="TypeError", says=r"the class Linear")
def class_for_model(bench: Bench) -> None:
    _, optim = make(steps=0)
    FlatOptimSavePlanner(wrong(nn.Linear), optim)


@mistake("no optimizer at all", raises="TypeError", says=r"optim")
def no_optimizer(bench: Bench) -> None:
    FlatOptimLoadPlanner(wrong(make(steps=0)[0]), wrong(None))


# ---------------------------------------------------------------- misspelt


@mistake("form='flattened'", raises="ValueError", says=r"form='flat', 'sharded' or 'full'")
def form_typo(bench: Bench) -> None:
    FlatOptimLoadPlanner(*make(steps=0), form=wrong("flattened"))


@mistake("form='sharded' with rank0_only", raises="ValueError", says=r"rank0_only=True, found")
def rank0_only_sharded(bench: Bench) -> None:
    FlatOptimLoadPlanner(*make(steps=0), form="sharded", rank0_only=True)


@mistake("broadcast='yes'", raises="ValueError", says=r"broadcast=True, False or 'auto'")
def broadcast_typo(bench: Bench) -> None:
    FlatOptimLoadPlanner(*make(steps=0), broadcast=wrong("yes"))


@mistake("strict='False', from a command line", raises="TypeError", says=r"strict.*True or False")
def strict_as_text(bench: Bench) -> None:
    FlatOptimLoadPlanner(*make(steps=0), strict=wrong("False"))


@mistake(
    "an option of the load for the save",
    raises="TypeError",
    says=r"no option 'strict': expected one of its own \(.*model_key",
)
def option_of_the_other_planner(bench: Bench) -> None:
    FlatOptimSavePlanner(*make(steps=0), strict=False)


@mistake("key=None", raises="TypeError", says=r"key=.*'optim'")
def key_none(bench: Bench) -> None:
    FlatOptimSavePlanner(*make(steps=0), key=wrong(None))


@mistake("stall_seconds=0", raises="ValueError", says=r"stall_seconds.*positive")
def stall_zero(bench: Bench) -> None:
    FlatOptimLoadPlanner(*make(steps=0), stall_seconds=0)


@mistake("concurrency=-1", raises="ValueError", says=r"concurrency.*-1")
def negative_concurrency(bench: Bench) -> None:
    StreamingWriter(bench.path, concurrency=-1)


@mistake("concurrency=0", raises="ValueError", says=r"concurrency.*0")
def zero_concurrency(bench: Bench) -> None:
    StreamingReader(bench.path, concurrency=0)


@mistake("max_inflight_bytes=0", raises="ValueError", says=r"max_inflight_bytes.*0")
def zero_bytes_in_flight(bench: Bench) -> None:
    StreamingWriter(bench.path, max_inflight_bytes=0)


@mistake("max_inflight_bytes=64, in MiB", raises="ValueError", says=r"4 MiB.*64")
def megabytes_for_bytes(bench: Bench) -> None:
    StreamingReader(bench.path, max_inflight_bytes=64)


@mistake("stall_seconds=0 for the writer", raises="ValueError", says=r"stall_seconds.*positive")
def writer_stall_zero(bench: Bench) -> None:
    StreamingWriter(bench.path, stall_seconds=0)


@mistake("backend='s3'", raises="StorageError", says=r"'auto', 'local', 'fsspec' or 'obstore'")
def backend_typo(bench: Bench) -> None:
    _save(bench, StreamingWriter(bench.path, backend=wrong("s3")))


# ---------------------------------------------------------------- one thing for another


def _save(bench: Bench, writer: Any, planner: Any = None) -> None:
    model, optim = make()
    state = {"optim": FlatOptimState(model, optim)}
    dcp.save(state, storage_writer=writer, planner=planner or FlatOptimSavePlanner(model, optim))


def _load(bench: Bench, reader: Any, planner: Any = None) -> None:
    model, optim = make()
    state = {"optim": FlatOptimState(model, optim)}
    dcp.load(state, storage_reader=reader, planner=planner or FlatOptimLoadPlanner(model, optim))


@mistake(
    "a reader for a writer",
    raises="AttributeError",
    says=r"storage_writer=, found a StreamingReader, .*dcp.load\(storage_reader=",
)
def reader_for_writer(bench: Bench) -> None:
    _save(bench, StreamingReader(bench.path))


@mistake(
    "a writer for a reader",
    raises="AttributeError",
    says=r"storage_reader=, found a StreamingWriter, .*dcp.save\(storage_writer=",
)
def writer_for_reader(bench: Bench) -> None:
    _load(bench, StreamingWriter(bench.good))


@mistake(
    "FullStateReader for a writer",
    raises="AttributeError",
    says=r"storage_writer=, found a FullStateReader",
)
def full_reader_for_writer(bench: Bench) -> None:
    _save(bench, FullStateReader(bench.path))


@mistake("the load planner for the save", raises="TypeError", says=r"FlatOptimSavePlanner")
def load_planner_for_save(bench: Bench) -> None:
    _save(bench, StreamingWriter(bench.path), FlatOptimLoadPlanner(*make(steps=0)))


@mistake("the save planner for the load", raises="TypeError", says=r"FlatOptimLoadPlanner")
def save_planner_for_load(bench: Bench) -> None:
    _load(bench, StreamingReader(bench.good), FlatOptimSavePlanner(*make(steps=0)))


@mistake(
    "planner for the writer",
    raises="AttributeError",
    says=r"found a FlatOptimSavePlanner, .*dcp.save\(planner=",
)
def planner_for_writer(bench: Bench) -> None:
    _save(bench, FlatOptimSavePlanner(*make(steps=0)), StreamingWriter(bench.path))


@mistake(
    "planner for the reader",
    raises="AttributeError",
    says=r"found a FlatOptimLoadPlanner, .*dcp.load\(planner=",
)
def planner_for_reader(bench: Bench) -> None:
    _load(bench, FlatOptimLoadPlanner(*make(steps=0)), StreamingReader(bench.good))


@mistake("the planner's class", raises="TypeError", says=r"")
def class_for_planner(bench: Bench) -> None:
    _save(bench, StreamingWriter(bench.path), FlatOptimSavePlanner)


@mistake(
    "a FlatOptimState loaded by hand", raises="AttributeError", says=r"FlatOptimState.*dcp.load"
)
def stateful_into_load_state_dict(bench: Bench) -> None:
    model, optim = make()
    optim.load_state_dict(wrong(FlatOptimState(model, optim)))


@mistake(
    "a FlatOptimState for stock's setter", raises="TypeError", says=r"FlatOptimState.*dcp.load"
)
def stateful_into_setter(bench: Bench) -> None:
    model, optim = make()
    set_optimizer_state_dict(model, optim, wrong(FlatOptimState(model, optim)))


@mistake("a FlatModelState loaded by hand", raises="TypeError", says=r"dict-like.*FlatModelState")
def model_stateful_into_load_state_dict(bench: Bench) -> None:
    model, _ = make()
    model.load_state_dict(wrong(FlatModelState(model)))
