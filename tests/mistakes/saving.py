"""Saves of the wrong thing, at the wrong time, or without our planner."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from dcp_fsdp_osd import (
    FlatModelState,
    FlatOptimSavePlanner,
    FlatOptimState,
    StreamingReader,
    StreamingWriter,
    verify_model_state,
    verify_optim_state,
)
from tests.mistakes.case import Bench, mistake
from tests.models import Mlp, train_steps, wrap_fsdp1
from tests.planners.checks import make


def _save(bench: Bench, state: dict[str, Any], planner: Any, **options: Any) -> None:
    dcp.save(state, storage_writer=StreamingWriter(bench.path), planner=planner, **options)


@mistake(
    "optim.state_dict() saved without our planner",
    raises="LayoutError",
    says=r"'optim'.*planner=FlatOptimSavePlanner\(model, optim\)",
)
def save_without_planner(bench: Bench) -> None:
    optim = make()[1]
    _save(bench, {"optim": optim.state_dict()}, None)


@mistake(
    "the same with use_orig_params=False, named and nested",
    raises="LayoutError",
    says=r"'app.optim'.*planner=FlatOptimSavePlanner\(model, optim\)",
)
def save_nested_without_planner(bench: Bench) -> None:
    _, optim = make(use_orig_params=False)
    _save(bench, {"app": {"optim": optim.state_dict()}, "step": 3}, DefaultSavePlanner())


@mistake(
    "a FlatOptimState saved without our planner",
    raises="LayoutError",
    says=r"planner=FlatOptimSavePlanner",
)
def save_stateful_without_planner(bench: Bench) -> None:
    dcp.save({"optim": FlatOptimState(*make())}, storage_writer=FileSystemWriter(bench.path))


@mistake(
    "a FlatModelState saved without our planner",
    raises="LayoutError",
    says=r"planner=FlatOptimSavePlanner",
)
def save_model_without_planner(bench: Bench) -> None:
    dcp.save({"model": FlatModelState(make()[0])}, storage_writer=FileSystemWriter(bench.path))


@mistake(
    "two optimizers, a planner for one",
    raises="LayoutError",
    says=r"'second'.*mapping.*\{'optim': .*'second': ",
)
def two_optimizers_one_planner(bench: Bench) -> None:
    model, optim = make()
    other = make(optim="momentum")[1]
    state = {"optim": optim.state_dict(), "second": other.state_dict()}
    planner = FlatOptimSavePlanner(model, optim)
    dcp.save(state, storage_writer=FileSystemWriter(bench.path), planner=planner)


@mistake(
    "a list of optimizers' state dicts under the key",
    raises="LayoutError",
    says=r"expected the state dict of an optimizer.*found list.*mapping",
)
def list_of_state_dicts(bench: Bench) -> None:
    model, optim = make()
    _save(bench, {"optim": [optim.state_dict()]}, FlatOptimSavePlanner(model, optim))


@mistake("a planner of another key", raises="LayoutError", says=r"under 'optim', found only.*'opt'")
def save_wrong_key(bench: Bench) -> None:
    model, optim = make()
    _save(bench, {"opt": optim.state_dict(), "step": 1}, FlatOptimSavePlanner(model, optim))


@mistake("a FlatModelState under a key of its own, which needs no telling", raises="", says="")
def save_with_another_model_key(bench: Bench) -> None:
    model, optim = make()
    state = {"net": FlatModelState(model), "optim": optim.state_dict()}
    _save(bench, state, FlatOptimSavePlanner(model, optim))
    assert verify_model_state(model, bench.path, key="net").ok


@mistake(
    "a plain optimizer dict, and a planner without arguments",
    raises="LayoutError",
    says=r"'optim'.*put FlatOptimState.*FlatOptimSavePlanner\(model, optim, key='optim'\)",
)
def plain_dict_without_arguments(bench: Bench) -> None:
    _save(bench, {"optim": make()[1].state_dict(), "step": 1}, FlatOptimSavePlanner())


@mistake(
    "a FlatOptimState within another dict, where DCP does not call its methods",
    raises="LayoutError",
    says=r"a FlatOptimState at the top of the state dict.*'app.optim'",
)
def nested_stateful(bench: Bench) -> None:
    _save(bench, {"app": {"optim": FlatOptimState(*make())}}, FlatOptimSavePlanner())


@mistake(
    "a FlatOptimState of another model's optimizer",
    raises="LayoutError",
    says=r"every parameter of the optimizer in the model",
)
def stateful_of_another_model(bench: Bench) -> None:
    state = {"optim": FlatOptimState(make()[0], make()[1])}
    _save(bench, state, FlatOptimSavePlanner())


@mistake("the optimizer itself in the state dict, which is a Stateful", raises="", says="")
def optimizer_in_state_dict(bench: Bench) -> None:
    model, optim = make()
    _save(bench, {"optim": optim}, FlatOptimSavePlanner(model, optim))
    assert verify_optim_state(model, optim, bench.path).ok


@mistake(
    "the optimizer was made before the model was wrapped (use_orig_params=False)",
    raises="LayoutError",
    says=r"not\. With use_orig_params=False the optimizer must be made after the model is wrapped",
)
def optimizer_before_wrapping(bench: Bench) -> None:
    model = Mlp()
    optim = torch.optim.AdamW(model.parameters())
    FlatOptimSavePlanner(wrap_fsdp1(model, use_orig_params=False), optim)


@mistake(
    "the planner was made before the model was wrapped",
    raises="LayoutError",
    says="first.weight: expected a parameter of shape .*make the planner after",
)
def planner_before_wrapping(bench: Bench) -> None:
    model = Mlp()
    optim = torch.optim.AdamW(model.parameters())
    planner = FlatOptimSavePlanner(model, optim)
    wrapped = wrap_fsdp1(model)
    train_steps(wrapped, optim, 1)
    _save(bench, {"optim": optim.state_dict()}, planner)


@mistake("optimizer of another model", raises="LayoutError", says=r"parameter 0 of group 0")
def optimizer_of_another_model(bench: Bench) -> None:
    FlatOptimSavePlanner(make(steps=0)[0], make(steps=0)[1])


@mistake(
    "state dict of another model's optimizer",
    raises="LayoutError",
    says=r"parameters of the model that the planner was made with",
)
def state_of_another_model(bench: Bench) -> None:
    model, optim = make()
    _save(bench, {"optim": make("odd")[1].state_dict()}, FlatOptimSavePlanner(model, optim))


@mistake("an empty dict is saved", raises="LayoutError", says=r"'state' and 'param_groups'")
def save_empty_dict(bench: Bench) -> None:
    _save(bench, {"optim": {}}, FlatOptimSavePlanner(*make()))


@mistake("state of rank 0 alone", raises="LayoutError", says=r"'state' and 'param_groups'|found")
def save_state_of_rank_0_alone(bench: Bench) -> None:
    model, optim = make()
    state = optim.state_dict() if bench.rank == 0 else {}
    _save(bench, {"optim": state}, FlatOptimSavePlanner(model, optim))


@mistake(
    "a param group added after the planner was made", raises="LayoutError", says=r"new planner"
)
def group_added_later(bench: Bench) -> None:
    model = wrap_fsdp1(Mlp())
    params = list(model.parameters())
    optim = torch.optim.AdamW(params[:-1])
    planner = FlatOptimSavePlanner(model, optim)
    optim.add_param_group({"params": params[-1:]})
    train_steps(model, optim, 1)
    _save(bench, {"optim": optim.state_dict()}, planner)


@mistake(
    "weights saved within summon_full_params", raises="LayoutError", says=r"summon_full_params"
)
def save_in_summon_full_params(bench: Bench) -> None:
    model, optim = make()
    with FSDP.summon_full_params(model):
        state = {"model": FlatModelState(model), "optim": optim.state_dict()}
        _save(bench, state, FlatOptimSavePlanner(model, optim))


@mistake("the optimizer saved within summon_full_params", raises="", says="")
def planner_in_summon_full_params(bench: Bench) -> None:
    model, optim = make()
    with FSDP.summon_full_params(model):
        _save(bench, {"optim": optim.state_dict()}, FlatOptimSavePlanner(model, optim))
    assert verify_optim_state(model, optim, bench.path).ok


@mistake(
    "the folder holds a checkpoint already", raises="StorageError", says=r"exists.*overwrite=True"
)
def save_over_a_checkpoint(bench: Bench) -> None:
    model, optim = make()
    writer = StreamingWriter(bench.good)
    planner = FlatOptimSavePlanner(model, optim)
    dcp.save({"optim": optim.state_dict()}, storage_writer=writer, planner=planner)


@mistake("ranks save different keys, all of which are kept", raises="", says="")
def different_keys_per_rank(bench: Bench) -> None:
    model, optim = make()
    state: dict[str, Any] = {"optim": optim.state_dict(), f"extra{bench.rank}": torch.ones(2)}
    _save(bench, state, FlatOptimSavePlanner(model, optim))
    loaded = {"extra0": torch.zeros(2), "extra1": torch.zeros(2)}
    dcp.load(loaded, storage_reader=StreamingReader(bench.path))
    assert loaded["extra0"].sum() == loaded["extra1"].sum() == 2


@mistake("another planner on one rank", raises="LayoutError", says=r"on every rank, found another")
def another_planner_on_one_rank(bench: Bench) -> None:
    model, optim = make()
    planner = FlatOptimSavePlanner(model, optim) if bench.rank == 0 else DefaultSavePlanner()
    dcp.save(
        {"optim": optim.state_dict()}, storage_writer=FileSystemWriter(bench.path), planner=planner
    )


@mistake(
    "scalar state that differs between ranks",
    raises="",
    says="not the same on every rank, so kept for each.*same layout only.*step",
    ranks=(0,),
)
def ranks_at_different_steps(bench: Bench) -> None:
    model, optim = make()
    for state in optim.state.values():
        state["step"] += bench.rank
    _save(bench, {"optim": optim.state_dict()}, FlatOptimSavePlanner(model, optim))


@mistake(
    "one planner in two threads at once",
    raises="LayoutError",
    says=r"a planner.*one save or load at a time.*another thread",
)
def one_planner_in_two_threads(bench: Bench) -> None:
    model, optim = make()
    planner = FlatOptimSavePlanner(model, optim)
    errors: list[BaseException] = []
    groups = [dist.new_group(), dist.new_group()]
    inside = threading.Barrier(2)

    class Slow(StreamingWriter):
        """Lets both saves come this far before either goes on."""

        def write_data(self, plan: Any, planner: Any) -> Any:
            inside.wait(20)
            return super().write_data(plan, planner)

    def save(number: int) -> None:
        try:
            writer = Slow(f"{bench.path}{number}")
            state = {"optim": optim.state_dict(), "step": number}
            dcp.save(state, storage_writer=writer, planner=planner, process_group=groups[number])
        except BaseException as error:
            errors.append(error)
            inside.abort()

    threads = [threading.Thread(target=save, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    told = [e for e in errors if "BrokenBarrier" not in str(e)]
    if told:
        raise told[0]


@mistake(
    "one writer in two overlapping async_save",
    raises="LayoutError",
    says=r"a writer to be used for one save or load at a time.*future of dcp.async_save",
)
def one_writer_in_two_async_saves(bench: Bench) -> None:
    state = {"weight": torch.full((10,), float(bench.rank)), "step": 1}
    tried = threading.Event()

    class Slow(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            assert tried.wait(20)
            return super().resolve_data(write_item)

    writer = StreamingWriter(bench.path)
    groups = [dist.new_group(backend="gloo"), dist.new_group(backend="gloo")]
    paths = [f"{bench.path}{number}" for number in range(2)]
    first, second = (
        dcp.async_save(
            {**state, "step": number},
            checkpoint_id=paths[number],
            storage_writer=writer,
            planner=Slow() if number == 0 else None,
            process_group=groups[number],
        )
        for number in range(2)
    )
    try:
        second.result(20)
    finally:
        tried.set()
        first.result(20)
        state["step"] = -1
        dcp.load(state, storage_reader=StreamingReader(paths[0]))
        assert state["step"] == 0


@mistake("no path at all", raises="StorageError", says=r"no path or URL")
def writer_without_path(bench: Bench) -> None:
    model, optim = make()
    planner = FlatOptimSavePlanner(model, optim)
    dcp.save({"optim": optim.state_dict()}, storage_writer=StreamingWriter(), planner=planner)


@mistake(
    "a sparse tensor in the optimizer's state",
    raises="StorageError",
    says=r"strides and memory.*torch.sparse_coo.*save its parts",
)
def sparse_optimizer_state(bench: Bench) -> None:
    model, optim = make()
    next(iter(optim.state.values()))["mask"] = torch.eye(3).to_sparse()
    _save(bench, {"optim": optim.state_dict()}, FlatOptimSavePlanner(model, optim))


@mistake("a tensor on the meta device", raises="LayoutError", says=r"meta")
def meta_tensors(bench: Bench) -> None:
    model, optim = make()
    state = {"optim": optim.state_dict(), "extra": torch.empty(3, device="meta")}
    _save(bench, state, FlatOptimSavePlanner(model, optim))


@mistake(
    "a lambda in the state dict",
    raises="Exception",
    says="sched.fn: expected a value that can be pickled, found function",
    ranks=(0,),
)
def lambda_in_state_dict(bench: Bench) -> None:
    model, optim = make()
    state = {"optim": optim.state_dict(), "sched": {"fn": lambda step: step}}
    _save(bench, state, FlatOptimSavePlanner(model, optim))


@mistake("keys that text cannot stand for", raises="LayoutError", says=r"object object at|key")
def keys_that_are_objects(bench: Bench) -> None:
    model, optim = make()
    for state in optim.state.values():
        state["by"] = {object(): torch.ones(())}
    _save(bench, {"optim": optim.state_dict()}, FlatOptimSavePlanner(model, optim))
