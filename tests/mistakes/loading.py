"""Loads into the wrong thing, from the wrong thing, or without our planner."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_optimizer_state_dict,
)

from dcp_fsdp_osd import (
    FlatModelState,
    FlatOptimLoadPlanner,
    FlatOptimSavePlanner,
    FlatOptimState,
    FullStateReader,
    StreamingReader,
    StreamingWriter,
    verify_optim_state,
)
from tests.mistakes.case import Bench, mistake
from tests.models import Mlp, train_steps, wrap_fsdp1
from tests.planners.checks import make


def _load(bench: Bench, state: dict[str, Any], planner: Any, **options: Any) -> None:
    reader = StreamingReader(bench.good, **options)
    dcp.load(state, storage_reader=reader, planner=planner)


@mistake(
    "optim.state_dict() loaded in place without our planner",
    raises="CheckpointMismatchError",
    says=r"'optim'.*planner=FlatOptimLoadPlanner\(model, optim\)",
)
def load_in_place_without_planner(bench: Bench) -> None:
    _, optim = make()
    _load(bench, {"optim": optim.state_dict()}, None)


@mistake(
    "the same, with allow_partial_load",
    raises="CheckpointMismatchError",
    says=r"'optim'.*planner=FlatOptimLoadPlanner\(model, optim\)",
)
def partial_load_without_planner(bench: Bench) -> None:
    _, optim = make()
    _load(bench, {"optim": optim.state_dict()}, DefaultLoadPlanner(allow_partial_load=True))


@mistake(
    "an empty dict loaded without our planner",
    raises="",
    says=r"nothing is loaded.*planner=FlatOptimLoadPlanner\(model, optim\)",
    ranks=(0,),
)
def load_empty_without_planner(bench: Bench) -> None:
    _load(bench, {"optim": {}}, None)


@mistake(
    "a FlatOptimState loaded without our planner",
    raises="RuntimeError",
    says="Missing key.*optim.__needs_FlatOptimSavePlanner_or_FlatOptimLoadPlanner__",
)
def load_stateful_without_planner(bench: Bench) -> None:
    model, optim = make()
    dcp.load({"optim": FlatOptimState(model, optim)}, storage_reader=FileSystemReader(bench.good))


@mistake(
    "a FlatModelState loaded without our planner",
    raises="RuntimeError",
    says="Missing key.*model.__needs_FlatOptimSavePlanner_or_FlatOptimLoadPlanner__",
)
def load_model_without_planner(bench: Bench) -> None:
    dcp.load({"model": FlatModelState(make()[0])}, storage_reader=FileSystemReader(bench.good))


@mistake(
    "form='full', into optim.load_state_dict",
    raises="CheckpointMismatchError",
    says=r"form='full'.*set_optimizer_state_dict.*form='flat'",
)
def full_form_into_load_state_dict(bench: Bench) -> None:
    model, optim = make()
    state: dict[str, Any] = {"optim": {}}
    _load(bench, state, FlatOptimLoadPlanner(model, optim, form="full"))
    optim.load_state_dict(state["optim"])


@mistake(
    "form='sharded', into optim.load_state_dict",
    raises="CheckpointMismatchError",
    says=r"form='sharded'.*set_optimizer_state_dict.*form='flat'",
)
def sharded_form_into_load_state_dict(bench: Bench) -> None:
    model, optim = make(use_orig_params=False)
    state: dict[str, Any] = {"optim": {}}
    _load(bench, state, FlatOptimLoadPlanner(model, optim, form="sharded"))
    optim.load_state_dict(state["optim"])


@mistake(
    "form='full' for rank 0 alone, into optim.load_state_dict",
    raises="CheckpointMismatchError",
    says=r"form='full'.*set_optimizer_state_dict",
)
def rank0_form_into_load_state_dict(bench: Bench) -> None:
    model, optim = make()
    state: dict[str, Any] = {"optim": {}}
    _load(bench, state, FlatOptimLoadPlanner(model, optim, form="full", rank0_only=True))
    optim.load_state_dict(state["optim"])


@mistake(
    "the flat form, into set_optimizer_state_dict",
    raises="CheckpointMismatchError",
    says=r"optim.load_state_dict.*form='sharded'",
)
def flat_form_into_setter(bench: Bench) -> None:
    model, optim = make()
    state: dict[str, Any] = {"optim": {}}
    _load(bench, state, FlatOptimLoadPlanner(model, optim))
    set_optimizer_state_dict(model, optim, state["optim"])


@mistake(
    "the flat form, into set_optimizer_state_dict with full_state_dict",
    raises="CheckpointMismatchError",
    says=r"optim.load_state_dict.*form='sharded'",
)
def flat_form_into_full_setter(bench: Bench) -> None:
    model, optim = make(use_orig_params=False)
    state: dict[str, Any] = {"optim": {}}
    _load(bench, state, FlatOptimLoadPlanner(model, optim))
    options = StateDictOptions(full_state_dict=True)
    set_optimizer_state_dict(model, optim, state["optim"], options=options)


@mistake(
    "two optimizers, a planner for one",
    raises="CheckpointMismatchError",
    says=r"'second'.*mapping.*\{'optim': .*'second': ",
)
def load_two_optimizers_one_planner(bench: Bench) -> None:
    model, optim = make()
    other = make(optim="momentum")[1]
    state = {"optim": {}, "second": other.state_dict()}
    _load(bench, state, FlatOptimLoadPlanner(model, optim))


@mistake(
    "a key that the checkpoint does not have",
    raises="CheckpointMismatchError",
    says="adam: nothing in the checkpoint under this key",
)
def load_wrong_key(bench: Bench) -> None:
    model, optim = make()
    _load(bench, {"adam": {}}, FlatOptimLoadPlanner(model, optim, key="adam"))


@mistake(
    "a key that the state dict does not have",
    raises="LayoutError",
    says=r"under 'optim', found only \['opt'\]; pass key=",
)
def load_key_not_in_state_dict(bench: Bench) -> None:
    _load(bench, {"opt": {}}, FlatOptimLoadPlanner(*make()))


@mistake(
    "an empty dict, and a planner without arguments",
    raises="CheckpointMismatchError",
    says=r"'optim' an empty dict.*FlatOptimLoadPlanner\(model, optim, key='optim'\)",
)
def empty_dict_without_arguments(bench: Bench) -> None:
    _load(bench, {"optim": {}, "step": 0}, FlatOptimLoadPlanner())


@mistake(
    "optim.state_dict(), and a planner without arguments",
    raises="CheckpointMismatchError",
    says=r"'optim'.*put FlatOptimState.*FlatOptimLoadPlanner\(model, optim, key='optim'\)",
)
def load_plain_dict_without_arguments(bench: Bench) -> None:
    _load(bench, {"optim": make()[1].state_dict(), "step": 0}, FlatOptimLoadPlanner())


@mistake(
    "FlatModelState under another key than it was saved",
    raises="CheckpointMismatchError",
    says=r"net: .*not in the checkpoint|net.*nothing in the checkpoint",
)
def load_model_under_another_key(bench: Bench) -> None:
    model, optim = make()
    state = {"net": FlatModelState(model), "optim": {}}
    _load(bench, state, FlatOptimLoadPlanner(model, optim, model_key="net"))


class Deeper(Mlp):
    def __init__(self) -> None:
        super().__init__(depth=3)


class Wider(Mlp):
    def __init__(self) -> None:
        super().__init__(hidden=12)


@mistake(
    "a smaller model",
    raises="CheckpointMismatchError",
    says=r"blocks.1.up.weight: in the checkpoint, but the optimizer has no such parameter",
)
def load_into_a_smaller_model(bench: Bench) -> None:
    model = wrap_fsdp1(Mlp(depth=1))
    optim = torch.optim.AdamW(model.parameters())
    _load(bench, {"optim": {}}, FlatOptimLoadPlanner(model, optim))


@mistake(
    "a larger model",
    raises="CheckpointMismatchError",
    says=r"blocks.2.up.weight: not in the checkpoint",
)
def load_into_a_larger_model(bench: Bench) -> None:
    model = wrap_fsdp1(Deeper())
    optim = torch.optim.AdamW(model.parameters())
    _load(bench, {"optim": {}}, FlatOptimLoadPlanner(model, optim))


@mistake(
    "weights into a wider model",
    raises="CheckpointMismatchError",
    says=r"blocks.0.up.weight.*\(10, 6\).*\(12, 6\)",
)
def load_into_a_wider_model(bench: Bench) -> None:
    model = wrap_fsdp1(Wider())
    optim = torch.optim.AdamW(model.parameters())
    state = {"model": FlatModelState(model), "optim": {}}
    _load(bench, state, FlatOptimLoadPlanner(model, optim))


@mistake(
    "the planner of another model",
    raises="CheckpointMismatchError",
    says=r"not of this model and optimizer",
)
def planner_of_another_model(bench: Bench) -> None:
    optim = make()[1]
    _load(bench, {"optim": optim.state_dict()}, FlatOptimLoadPlanner(*make("odd")))


@mistake(
    "the planner of one optimizer, the state dict of another, in place",
    raises="FlatOptimError",
    says="expected the optimizer's tensor to have shape",
)
def in_place_into_another_optimizer(bench: Bench) -> None:
    model, optim = make()
    _load(bench, {"optim": make("odd")[1].state_dict()}, FlatOptimLoadPlanner(model, optim))


@mistake(
    "strict=False to get over a wrong key",
    raises="",
    says=r"nothing in the checkpoint under this key",
)
def lenient_with_a_wrong_key(bench: Bench) -> None:
    model, optim = make()
    planner = FlatOptimLoadPlanner(model, optim, key="adam", strict=False)
    _load(bench, {"adam": {}}, planner)


@mistake(
    "a None where the optimizer is to be loaded",
    raises="LayoutError",
    says=r"under 'optim'.*empty dict.*found NoneType",
)
def load_into_none(bench: Bench) -> None:
    _load(bench, {"optim": None}, FlatOptimLoadPlanner(*make()))


@mistake(
    "the optimizer itself in the state dict, which is a Stateful",
    raises="",
    says="",
)
def load_into_the_optimizer(bench: Bench) -> None:
    model, optim = make(steps=0)
    _load(bench, {"optim": optim}, FlatOptimLoadPlanner(model, optim))
    assert verify_optim_state(model, optim, bench.good).ok


@mistake(
    "a model key that the checkpoint lacks",
    raises="RuntimeError",
    says=r"Missing key in checkpoint state_dict: epoch",
)
def load_missing_plain_key(bench: Bench) -> None:
    model, optim = make()
    _load(bench, {"optim": {}, "epoch": 0}, FlatOptimLoadPlanner(model, optim))


@mistake(
    "add_param_group after the planner was made", raises="LayoutError", says=r"make a new planner"
)
def load_after_add_param_group(bench: Bench) -> None:
    model = wrap_fsdp1(Mlp())
    params = list(model.parameters())
    optim = torch.optim.AdamW(params[:-1])
    planner = FlatOptimLoadPlanner(model, optim)
    optim.add_param_group({"params": params[-1:]})
    _load(bench, {"optim": {}}, planner)


@mistake(
    "another planner on one rank",
    raises="CheckpointMismatchError",
    says=r"on every rank, found another planner",
)
def another_load_planner_on_one_rank(bench: Bench) -> None:
    model, optim = make()
    planner = FlatOptimLoadPlanner(model, optim) if bench.rank == 0 else DefaultLoadPlanner()
    state = {"step": 0} if bench.rank else {"optim": {}, "step": 0}
    dcp.load(state, storage_reader=FileSystemReader(bench.good), planner=planner)


@mistake(
    "a full state without rank 0's file",
    raises="Exception",
    says="no file of a full state",
)
def full_state_file_missing(bench: Bench) -> None:
    model, optim = make()
    reader = FullStateReader(bench.path if bench.rank == 0 else None)
    dcp.load({"optim": {}}, storage_reader=reader, planner=FlatOptimLoadPlanner(model, optim))


@mistake(
    "FullStateReader of a checkpoint's folder",
    raises="Exception",
    says="is a folder.*StreamingReader",
)
def full_state_of_a_folder(bench: Bench) -> None:
    model, optim = make()
    reader = FullStateReader(bench.good)
    dcp.load({"optim": {}}, storage_reader=reader, planner=FlatOptimLoadPlanner(model, optim))


@mistake(
    "a full state with stock's planner", raises="StorageError", says=r"planner=FlatOptimLoadPlanner"
)
def full_state_without_planner(bench: Bench) -> None:
    full = {"x": torch.ones(3)}
    state = {"x": torch.zeros(3)}
    dcp.load(state, storage_reader=FullStateReader(full if bench.rank == 0 else None))


@mistake(
    "verified against another optimizer's key",
    raises="AssertionError",
    says="adam: nothing in the checkpoint|not in the checkpoint",
)
def verify_wrong_key(bench: Bench) -> None:
    _assert_same(verify_optim_state(*make(), bench.good, key="adam"))


def _assert_same(found: Any) -> None:
    """As users do, with the text of what was found."""
    assert found.ok, str(found)


@mistake(
    "per-rank state at another layout",
    raises="CheckpointMismatchError",
    says=r"per rank|another layout|same layout|other layout",
)
def per_rank_state_at_another_layout(bench: Bench) -> None:
    model, optim = make()
    for state in optim.state.values():
        state["factor"] = torch.ones(3)
    planner = FlatOptimSavePlanner(model, optim)
    dcp.save(
        {"optim": optim.state_dict()}, storage_writer=StreamingWriter(bench.path), planner=planner
    )
    model, optim = make(use_orig_params=False)
    reader = StreamingReader(bench.path)
    dcp.load({"optim": {}}, storage_reader=reader, planner=FlatOptimLoadPlanner(model, optim))


@mistake("the model was trained between save and verify", raises="AssertionError", says=r"exp_avg")
def verify_after_training(bench: Bench) -> None:
    model, optim = make()
    train_steps(model, optim, 1)
    _assert_same(verify_optim_state(model, optim, bench.good))


@mistake(
    "the optimizer's own state dict, for the checkpoint's optimizer of another kind",
    raises="",
    says=r"(?s)momentum_buffer|SGD",
)
def load_into_another_kind_of_optimizer(bench: Bench) -> None:
    model, optim = make(optim="momentum")
    _load(bench, {"optim": {}}, FlatOptimLoadPlanner(model, optim))
