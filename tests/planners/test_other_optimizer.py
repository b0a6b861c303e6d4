"""A checkpoint of another optimizer: said, and refused where the state cannot be used."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from dcp_fsdp_osd import FlatOptimLoadPlanner, FlatOptimSavePlanner
from tests.models import Mlp, train_steps, wrap_fsdp1
from tests.planners.checks import assert_same
from tests.ranks import RankError, run_ranks


class Lion(torch.optim.Optimizer):
    """Someone's optimizer, whose only state has the name and the shape of another's."""

    def __init__(self, params: Any, lr: float = 0.1, hook: Any = None) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0, "hook": hook})
        self.made_by_its_constructor = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert self.made_by_its_constructor
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    exp_avg = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                    p -= group["lr"] * exp_avg.lerp_(p.grad, 0.1).sign()


MAKE: dict[str, Any] = {
    "adam": lambda params: torch.optim.Adam(params, lr=0.5, weight_decay=0.25),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.5),
    "amsgrad": lambda params: torch.optim.AdamW(params, lr=0.5, amsgrad=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.1),
    "centered": lambda params: torch.optim.RMSprop(params, centered=True, momentum=0.9),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.1),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.1),
    "rprop": lambda params: torch.optim.Rprop(params, lr=0.1),
    "lion": Lion,
}


def _model(use_orig_params: bool) -> nn.Module:
    return wrap_fsdp1(Mlp(), use_orig_params=use_orig_params)


def _saves(rank: int, world: int, path: str, names: list[str]) -> None:
    """A checkpoint of each, ours and stock's."""
    for name in names:
        model = _model(True)
        optim = MAKE[name](model.parameters())
        train_steps(model, optim, 2)
        planner = FlatOptimSavePlanner(model, optim)
        state: dict[str, Any] = {"optim": optim.state_dict()}
        dcp.save(state, storage_writer=FileSystemWriter(f"{path}/{name}"), planner=planner)
        state = {"optim": get_optimizer_state_dict(model, optim)}
        dcp.save(state, storage_writer=FileSystemWriter(f"{path}/{name}-stock"))


def _load(
    path: str, name: str, *, live: bool = False, use_orig_params: bool = True, **options: Any
) -> tuple[Any, Any, dict[str, Any], list[str], list[str]]:
    """Model, optimizer, what was loaded, what was skipped, and the warnings."""
    model = _model(use_orig_params)
    optim = MAKE[name](model.parameters())
    if live:
        train_steps(model, optim, 1)
    planner = FlatOptimLoadPlanner(model, optim, **options)
    state = {"optim": optim.state_dict() if live else {}}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dcp.load(state, storage_reader=FileSystemReader(path), planner=planner)
    told = [str(w.message) for w in caught if "skipped (strict" not in str(w.message)]
    assert not optim.state or live
    return model, optim, state["optim"], planner.skipped, [t for t in told if "optim" in t]


def _used(rank: int, world: int, path: str) -> None:
    """State that another class takes over: named, and never without a word."""
    for stock in ("", "-stock"):
        for use_orig_params in (True, False):
            args: dict[str, Any] = {"use_orig_params": use_orig_params}
            for form in ("flat", "sharded", "full"):
                told = _load(f"{path}/adam{stock}", "sgd", form=form, **args)[-1]
                assert len(told) == 1, told
                assert "that SGD does not keep is loaded: exp_avg, exp_avg_sq, step" in told[0]
                if not stock:
                    assert "torch.optim.adam.Adam(lr=0.5, " in told[0] and "is SGD" in told[0]
                    assert "betas" in told[0] and "lr, " in told[0] and "weight_decay" in told[0]
            model, optim, loaded, _, told = _load(f"{path}/adam{stock}", "adamw", **args)
            assert bool(told) == (not stock) and ("does not keep" not in "".join(told))
            optim.load_state_dict(loaded)
            train_steps(model, optim, 1)
            # no state, no harm: only options are taken over
            model, optim, loaded, _, told = _load(f"{path}/sgd{stock}", "adam", **args)
            assert bool(told) == (not stock)
            optim.load_state_dict(loaded)
            train_steps(model, optim, 1)
            # a class of someone's: not stepped to find out
            told = _load(f"{path}/adam{stock}", "lion", **args)[-1]
            assert bool(told) == (not stock)
            told = _load(f"{path}/adam{stock}", "lion", live=True, strict=False, **args)[-1]
            assert "that Lion does not keep is loaded: exp_avg_sq, step" in told[0]
        # the same class is never another, whatever its options made it keep
        for saved in ("adamw", "amsgrad"):
            for live in ("adamw", "amsgrad"):
                model, optim, loaded, _, told = _load(f"{path}/{saved}{stock}", live)
                assert not told or (stock and (saved, live) == ("amsgrad", "adamw")), told
                assert ("max_exp_avg_sq" in loaded["state"][0]) == (saved == "amsgrad")
                optim.load_state_dict(loaded)
                train_steps(model, optim, 1)
        model, optim, loaded, _, told = _load(f"{path}/rmsprop{stock}", "centered")
        assert not told
        optim.load_state_dict(loaded)
        train_steps(model, optim, 1)


def test_state_of_another_class_is_taken_over_with_a_warning(tmp_path: Path) -> None:
    run_ranks(_saves, 2, str(tmp_path), ["adam", "adamw", "sgd", "amsgrad", "rmsprop"])
    run_ranks(_used, 2, str(tmp_path), timeout=120)


PAIRS = [
    ("momentum", "adam", "'step'"),
    ("lion", "adamw", "'step'"),
    ("adam", "rmsprop", "'square_avg'"),
    ("adamw", "nadam", "'mu_product'"),
    ("adam", "rprop", "'prev'"),
    ("adagrad", "adam", "'exp_avg'"),
]


def _unused(rank: int, world: int, path: str) -> None:
    for saved, live, missing in PAIRS:
        for stock in ("", "-stock"):
            for form in ("flat", "full") if (saved, stock) == ("momentum", "") else ("flat",):
                try:
                    _load(f"{path}/{saved}{stock}", live, form=form)
                except BaseException as error:
                    text = str(error)
                else:
                    raise AssertionError(f"{saved}{stock} -> {live} was loaded")
                assert "CheckpointMismatchError" in text
                name = type(MAKE[live]([nn.Parameter(torch.ones(1))])).__qualname__
                assert f"expected {missing} in the checkpoint, without which {name} does" in text
                assert stock or type(MAKE[saved]([nn.Parameter(torch.ones(1))])).__name__ in text
            for use_orig_params in (True, False):
                model, optim, loaded, skipped, _ = _load(
                    f"{path}/{saved}{stock}", live, strict=False, use_orig_params=use_orig_params
                )
                assert loaded["state"] == {}
                told = {line.partition(": ")[0] for line in skipped}
                assert told == {name for name, _ in Mlp().named_parameters()}
                optim.load_state_dict(loaded)
                train_steps(model, optim, 1)


def test_state_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    run_ranks(_saves, 2, str(tmp_path), sorted({pair[0] for pair in PAIRS}))
    run_ranks(_unused, 2, str(tmp_path), timeout=120)


def _two(rank: int, world: int, path: str) -> None:
    model = wrap_fsdp1(Mlp(), policy="linears")
    first, *rest = model.parameters()

    def optims(one: str, other: str) -> dict[str, Any]:
        return {"a.first": MAKE[one]([first]), "b": MAKE[other](rest)}

    saved = optims("adam", "momentum")
    train_steps(model, saved.values(), 1)
    state: dict[str, Any] = {
        "a": {"first": saved["a.first"].state_dict()},
        "b": saved["b"].state_dict(),
    }
    planner = FlatOptimSavePlanner(model, saved)
    dcp.save(state, storage_writer=FileSystemWriter(path), planner=planner)
    for one, other, expected in (
        ("adam", "momentum", []),
        ("adamw", "momentum", ["a.first: the checkpoint was saved by torch.optim.adam.Adam("]),
        ("adam", "lion", ["b: the checkpoint was saved by torch.optim.sgd.SGD("]),
    ):
        live = optims(one, other)
        into: dict[str, Any] = {"a": {"first": {}}, "b": {}}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            planner = FlatOptimLoadPlanner(model, live)
            dcp.load(into, storage_reader=FileSystemReader(path), planner=planner)
        told = [text for w in caught if "was saved by" in (text := str(w.message))]
        assert len(told) == len(expected)
        assert all(text.startswith(start) for text, start in zip(told, expected, strict=True))
        assert_same(into["b"]["state"], saved["b"].state_dict()["state"])
    live = optims("adam", "adam")
    into = {"a": {"first": {}}, "b": {}}
    dcp.load(
        into,
        storage_reader=FileSystemReader(path),
        planner=FlatOptimLoadPlanner(model, live),
    )


def test_each_of_several_optimizers_has_its_class(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"b: the checkpoint is not of this model") as caught:
        run_ranks(_two, 2, str(tmp_path))
    assert caught.value.all_raised("CheckpointMismatchError")
    assert "without which Adam does not make a step" in str(caught.value)
