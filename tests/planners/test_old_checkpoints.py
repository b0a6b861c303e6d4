"""Checkpoints of torch before 2.4, of other names, and of what knows no names."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, _version
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import OptimStateKeyType

from tests.breadth import always
from tests.models import Mlp, train_steps, wrap_fsdp1
from tests.planners.checks import OPTIMIZERS, assert_same, load, make, save
from tests.planners.test_interop import build, compare, full
from tests.ranks import RankError, run_ranks


def _store(value: dict[str, Any], path: str) -> Any:
    """Save with stock's planner."""
    return dcp.save({"optim": value}, storage_writer=FileSystemWriter(path))


def _reads(rank: int, world: int, path: str, model: str, optim: str, expected: Any) -> None:
    """Under FSDP1 with either ``use_orig_params``, in both forms of an empty dict, and in place."""
    for use_orig_params in (True, False):
        if model == "frozen_mixed" and not use_orig_params:
            continue
        wrapped, fresh = make(model, optim, steps=0, use_orig_params=use_orig_params)
        fresh.load_state_dict(load(wrapped, fresh, path))
        compare(full(wrapped, fresh), copy.deepcopy(expected))
        other = OPTIMIZERS[optim](wrapped.parameters())
        train_steps(wrapped, other, 1)
        other.load_state_dict(load(wrapped, other, path, into=other.state_dict()))
        compare(full(wrapped, other), copy.deepcopy(expected))
        sharded = load(wrapped, fresh, path, form="sharded")
        other = OPTIMIZERS[optim](wrapped.parameters())
        set_optimizer_state_dict(wrapped, other, sharded)
        compare(full(wrapped, other), copy.deepcopy(expected))


# ---------------------------------------------------------------- keys of torch 2.3


@contextmanager
def _torch_2_3() -> Iterator[None]:
    """DCP flattens as torch 2.3 did: what holds no tensor becomes one object."""
    _version._derived_version = "2_3"
    try:
        yield
    finally:
        _version._derived_version = None


def _save_2_3(rank: int, world: int, path: str, model: str, optim: str) -> tuple[Any, list[str]]:
    wrapped, optimizer = make(model, optim)
    with _torch_2_3():
        metadata = _store(get_optimizer_state_dict(wrapped, optimizer), path)
    return full(wrapped, optimizer), sorted(metadata.state_dict_metadata) if rank == 0 else []


@pytest.mark.parametrize(
    ("model", "optim", "keys"),
    [
        ("mlp", "adamw", ["optim.param_groups"]),
        pytest.param("mlp", "momentum", ["optim.param_groups"], marks=pytest.mark.slow),
        ("mlp", "tensor_lr", ["optim.param_groups.0.lr", "optim.param_groups.0.params"]),
        ("frozen_mixed", "adamw", ["optim.param_groups"]),
    ],
)
def test_keys_of_torch_2_3(tmp_path: Path, model: str, optim: str, keys: list[str]) -> None:
    expected, found = run_ranks(_save_2_3, 4, str(tmp_path), model, optim)[0]
    assert set(keys) <= set(found)
    run_ranks(_reads, 2, str(tmp_path), model, optim, expected)


class _Flags(torch.optim.SGD):
    """Keeps state without a tensor in it for some parameters, and groups with and without one."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for number, param in enumerate(self.param_groups[0]["params"]):
            self.state[param]["flags"] = {"seen": 3, "names": ["a"]}
            if number % 2:
                self.state[param]["sum"] = torch.full_like(param, number)
        self.param_groups[1]["lr"] = torch.tensor(0.5)


def _flags() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Mlp()
    first, *rest = model.parameters()
    return model, _Flags([{"params": rest}, {"params": [first]}], lr=0.1)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_objects_of_torch_2_3_at_every_level(tmp_path: Path) -> None:
    model, optim = _flags()
    train_steps(model, optim, 1)
    first, *rest = (name for name, _ in model.named_parameters())
    names = [*rest, first]  # the optimizer's order
    by_name = copy.deepcopy(optim.state_dict())
    by_name["state"] = {names[number]: state for number, state in by_name["state"].items()}
    for group in by_name["param_groups"]:
        group["params"] = [names[number] for number in group["params"]]
    with _torch_2_3():
        metadata = _store(by_name, str(tmp_path))
    keys = set(metadata.state_dict_metadata)
    assert {"optim.param_groups.0", "optim.param_groups.1.lr", "optim.state.first.bias"} <= keys
    fresh_model, fresh = _flags()
    assert_same(load(fresh_model, fresh, tmp_path), optim.state_dict())


def _without_state(rank: int, world: int, path: str, tensor: bool) -> Any:
    model = wrap_fsdp1(Mlp())
    optim = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.25) if tensor else 0.25)
    with _torch_2_3():
        _store(get_optimizer_state_dict(model, optim), path)
    fresh = torch.optim.SGD(model.parameters(), lr=torch.tensor(1.0) if tensor else 1.0)
    return load(model, fresh, path)["param_groups"][0]["lr"]


def test_an_optimizer_of_torch_2_3_without_state(tmp_path: Path) -> None:
    assert run_ranks(_without_state, 2, str(tmp_path / "a"), True) == [torch.tensor(0.25)] * 2
    with pytest.raises(RankError, match=r"optim: saved as one object .* before 2\.4"):
        run_ranks(_without_state, 2, str(tmp_path / "b"), False)


# ---------------------------------------------------------------- names of wrappers left in

_PREFIXES = {
    "ddp": lambda name: f"module.{name}",
    "compiled": lambda name: f"_orig_mod.{name}",
    "compiled ddp": lambda name: f"module._orig_mod.{name}",
    "fsdp": lambda name: "_fsdp_wrapped_module." + name.replace(".up", "._fsdp_wrapped_module.up"),
    "torch 1.11": lambda name: f"_fsdp_wrapped_module._fpw_module.{name}",
    "checkpoint": lambda name: name.replace(".down", "._checkpoint_wrapped_module.down"),
}


def _prefixed(rank: int, world: int, path: str, kind: str, flatten: bool, old: bool) -> Any:
    model, optim = build("fsdp1", world)
    train_steps(model, optim, 2)
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    state = get_optimizer_state_dict(model, optim, options=options)
    rename: Any = _PREFIXES[kind]
    fqns = [name for name, _ in Mlp().named_parameters()]
    if flatten:
        renamed = {}
        for key, value in state.items():
            fqn = max((n for n in fqns if f".{n}." in key), key=len)
            renamed[key.replace(f".{fqn}.", f".{rename(fqn)}.")] = value
    else:
        renamed = {
            "state": {rename(name): value for name, value in state["state"].items()},
            "param_groups": [
                {**group, "params": [rename(name) for name in group["params"]]}
                for group in state["param_groups"]
            ],
        }
    if old:
        with _torch_2_3():
            _store(renamed, path)
    else:
        _store(renamed, path)
    return full(model, optim)


@pytest.mark.parametrize("kind", always(["compiled ddp", "torch 1.11"], _PREFIXES))
def test_names_of_wrappers_left_in(tmp_path: Path, kind: str) -> None:
    for flatten, old in ((False, False), (True, False), (False, True)):
        path = str(tmp_path / f"{flatten}{old}")
        expected = run_ranks(_prefixed, 4, path, kind, flatten, old)[0]
        if kind == "fsdp" and not flatten:  # whose sharded form stock takes nested only
            run_ranks(_reads, 2, path, "mlp", "adamw", expected)
        else:
            run_ranks(_flat_only, 2, path, expected)


def _flat_only(rank: int, world: int, path: str, expected: Any) -> None:
    model, fresh = make(steps=0)
    fresh.load_state_dict(load(model, fresh, path))
    compare(full(model, fresh), expected)


class _Own(nn.Module):
    """The user's own ``module``, beside a layer of the name that is left without it."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.ModuleDict({"layer": nn.Linear(2, 2)})
        self.layer = nn.Linear(2, 2)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_names_are_taken_as_they_are_where_they_can_be(tmp_path: Path) -> None:
    model = _Own()
    optim = OPTIMIZERS["adamw"](model.parameters())
    for number, param in enumerate(model.parameters()):
        param.grad = torch.full_like(param, number)
    optim.step()
    save(model, optim, tmp_path)
    assert_same(load(model, OPTIMIZERS["adamw"](model.parameters()), tmp_path), optim.state_dict())


# ---------------------------------------------------------------- other writers


def _optim_input(rank: int, world: int, path: str, kind: str) -> Any:
    model, optim = make("mlp", use_orig_params=False)
    params = list(model.parameters())
    if kind == "full":
        state = FSDP.full_optim_state_dict(model, optim, optim_input=params, rank0_only=False)
    else:
        state = FSDP.sharded_optim_state_dict(model, optim)
    _store(state, path)
    return full(model, optim)


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_fsdp_with_optim_input(tmp_path: Path, kind: str) -> None:
    expected = run_ranks(_optim_input, 4, str(tmp_path), kind)[0]
    run_ranks(_reads, 2, str(tmp_path), "mlp", "adamw", expected)


# ---------------------------------------------------------------- numbers


def _numbered(rank: int, world: int, path: str, kind: str) -> None:
    if kind == "rekeyed":
        model, optim = make()
        state = FSDP.full_optim_state_dict(model, optim, rank0_only=False)
        plain = Mlp()
        by = OptimStateKeyType.PARAM_ID
        optimizer = OPTIMIZERS["adamw"](plain.parameters())
        _store(FSDP.rekey_optim_state_dict(state, by, plain, optim=optimizer), path)
    else:
        model, optim = build(kind, world)
        train_steps(model, optim, 2)
        _store(optim.state_dict(), path)
    try:
        fresh_model, fresh = make(steps=0)
        load(fresh_model, fresh, path)
    except BaseException as error:
        assert "found them under numbers" in str(error) and "save it again" in str(error)
        assert "not in the checkpoint\n" not in str(error)  # and not a line for each parameter
    else:
        raise AssertionError("expected an error")


@pytest.mark.parametrize("kind", ["ddp", "fsdp1", "rekeyed"])
def test_numbers_for_names_are_an_error(tmp_path: Path, kind: str) -> None:
    run_ranks(_numbered, 2, str(tmp_path), kind)


def _convert(rank: int, world: int, path: str) -> Any:
    """What the error says to do."""
    model, optim = build("ddp", world)
    train_steps(model, optim, 2)
    _store(optim.state_dict(), f"{path}/old")
    same_model, same = build("ddp", world)
    train_steps(same_model, same, 1)
    state = {"optim": same.state_dict()}
    dcp.load(state, storage_reader=FileSystemReader(f"{path}/old"))
    same.load_state_dict(state["optim"])
    save(same_model, same, f"{path}/new")
    return full(model, optim)


def test_the_way_out_of_numbers(tmp_path: Path) -> None:
    expected = run_ranks(_convert, 2, str(tmp_path))[0]
    run_ranks(_reads, 2, str(tmp_path / "new"), "mlp", "adamw", expected)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_numbers_that_are_names(tmp_path: Path) -> None:
    model = nn.ParameterList(nn.Parameter(torch.ones(3)) for _ in range(3))
    optim = OPTIMIZERS["adamw"](model.parameters())
    for param in model:
        param.grad = torch.ones(3)
    optim.step()
    save(model, optim, tmp_path)
    assert_same(load(model, OPTIMIZERS["adamw"](model.parameters()), tmp_path), optim.state_dict())
