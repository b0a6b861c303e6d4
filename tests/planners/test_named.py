"""Optimizers by name, several optimizers, several models, one optimizer per parameter, adapters."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import _NamedOptimizer
from torch.nn.parallel import DistributedDataParallel

from dcp_fsdp_osd import FlatOptimLoadPlanner, FlatOptimSavePlanner
from tests.models import Mlp, inner, train_steps, two_groups, wrap_fsdp1
from tests.planners.checks import OPTIMIZERS, assert_same, load, save
from tests.planners.test_interop import compare, full
from tests.ranks import run_ranks

# ---------------------------------------------------------------- state under names


def _wrap(kind: str) -> nn.Module:
    model = Mlp()
    if kind == "fsdp1":
        return wrap_fsdp1(model)
    if kind == "fsdp1_flat":
        return wrap_fsdp1(model, use_orig_params=False)
    if kind == "fsdp2":
        return fully_shard(model)
    return DistributedDataParallel(model)


def _named(model: nn.Module, groups: bool) -> Any:
    """Names are those of the wrapped model, as its users get them."""
    options: dict[str, Any] = {"lr": 0.01}
    if groups:  # their names are sorted in the state dict, the parameters are not
        options["param_groups"] = two_groups(model)
    return _NamedOptimizer(model.named_parameters(), torch.optim.AdamW, **options)


def _train_named(model: nn.Module, optim: Any, steps: int) -> None:
    """(It has no ``zero_grad``.)"""
    for step in range(steps):
        model(torch.full((2, 6), 0.1 * (step + 1))).pow(2).mean().backward()
        optim.step()
        for param in model.parameters():
            param.grad = None


def _state_by_name(optim: Any) -> dict[str, Any]:
    return copy.deepcopy(optim.state_dict())


def _save_named(rank: int, world: int, path: str, kind: str, groups: bool) -> Any:
    model = _wrap(kind)
    optim = _named(model, groups)
    _train_named(model, optim, 2)
    before = _state_by_name(optim)
    save(model, optim, path)
    fresh_model = _wrap(kind)
    fresh = _named(fresh_model, groups)
    _train_named(fresh_model, fresh, 1)  # it can only be loaded once it has state
    for into in ({}, fresh.state_dict()):
        loaded = load(fresh_model, fresh, path, into=into)
        assert loaded["state"].keys() == before["state"].keys()
        fresh.load_state_dict(loaded)
        assert_same(_state_by_name(fresh)["state"], before["state"])
        _train_named(fresh_model, fresh, 1)
    plain = torch.optim.AdamW(model.parameters(), lr=0.01)
    if groups:
        plain = torch.optim.AdamW(two_groups(model), lr=0.01)
    for param, state in optim.state.items():
        plain.state[param] = state
    return full(model, plain)


def _load_unnamed(rank: int, world: int, path: str, expected: Any) -> None:
    model = wrap_fsdp1(Mlp(), policy="linears")
    optim = torch.optim.AdamW(two_groups(model), lr=0.01)
    optim.load_state_dict(load(model, optim, path))
    assert_same(full(model, optim)["state"], expected["state"])


@pytest.mark.each_value
@pytest.mark.filterwarnings("ignore:Since we pass in param_groups")
@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("kind", ["fsdp1", "fsdp1_flat", "fsdp2", "ddp"])
def test_named_optimizer(tmp_path: Path, kind: str, groups: bool) -> None:
    if kind == "fsdp1_flat" and groups:
        pytest.skip("flat parameters have no groups by name")
    expected = run_ranks(_save_named, 4, str(tmp_path), kind, groups)[0]
    run_ranks(_load_unnamed, 2, str(tmp_path), expected)


# ---------------------------------------------------------------- several


def _modules(seed: int) -> nn.ModuleDict:
    return nn.ModuleDict({"actor": Mlp(seed=seed), "critic": Mlp(depth=1, seed=seed + 1)})


class _Both(nn.Module):
    """Two models that are wrapped each on its own, trained by one optimizer."""

    def __init__(self, wrapping: dict[str, Any]) -> None:
        super().__init__()
        self.models = nn.ModuleDict(
            {name: wrap_fsdp1(model, **wrapping) for name, model in _modules(0).items()}
        )

    def batch(self, generator: torch.Generator) -> torch.Tensor:
        return inner(self.models["actor"]).batch(generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.models["actor"](x) + self.models["critic"](x)


def _one_optimizer(
    rank: int, world: int, path: str, wrapping: dict[str, Any], expected: Any
) -> Any:
    model = _Both(wrapping)
    optim = OPTIMIZERS["adamw"](model.parameters())
    if expected is None:
        train_steps(model, optim, 2)
        save(model, optim, path)
    else:
        optim.load_state_dict(load(model, optim, path))
    # Stock takes one FSDP root at a time; this rank's pieces under plain names tell the rest.
    loaded = load(model, OPTIMIZERS["adamw"](model.parameters()), path, form="full")
    if expected is not None:
        assert_same(loaded, expected)
        assert {name.split(".")[1] for name in loaded["state"]} == {"actor", "critic"}
        again = OPTIMIZERS["adamw"](model.parameters())
        assert_same(load(model, again, path), optim.state_dict())
    else:
        fresh = OPTIMIZERS["adamw"](model.parameters())
        assert_same(load(model, fresh, path), optim.state_dict())
    return loaded


def test_one_optimizer_over_several_models(tmp_path: Path) -> None:
    flat = {"use_orig_params": False}
    expected = run_ranks(_one_optimizer, 4, str(tmp_path), {}, None)[0]
    run_ranks(_one_optimizer, 2, str(tmp_path), flat, expected)


def _per_parameter(
    rank: int, world: int, path: str, wrapping: dict[str, Any] | None, expected: Any
) -> Any:
    """As torchtitan: one optimizer for each parameter, stepped in backward."""
    model = fully_shard(Mlp()) if wrapping is None else wrap_fsdp1(Mlp(), **wrapping)
    optims = {
        f"optim.{number}": torch.optim.AdamW([param], lr=0.01)
        for number, param in enumerate(model.parameters())
    }
    of_param = dict(zip(model.parameters(), optims.values(), strict=True))

    def step(param: torch.Tensor) -> None:
        of_param[param].step()
        of_param[param].zero_grad()

    if wrapping is None:  # FSDP1's gradients come after the hooks of its parameters
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(step)
    if expected is None:
        train_steps(model, [] if wrapping is None else optims.values(), 2)
        state = {"optim": {k.split(".")[1]: o.state_dict() for k, o in optims.items()}}
        dcp.save(
            state,
            storage_writer=FileSystemWriter(path),
            planner=FlatOptimSavePlanner(model, optims),
        )
    loaded: dict[str, Any] = {"optim": {k.split(".")[1]: {} for k in optims}}
    dcp.load(
        loaded,
        storage_reader=FileSystemReader(path),
        planner=FlatOptimLoadPlanner(model, optims),
    )
    if expected is None:
        assert_same(loaded, state)
    for name, optim in optims.items():
        optim.load_state_dict(loaded["optim"][name.split(".")[1]])
    whole = OPTIMIZERS["adamw"](model.parameters())
    for param, optim in of_param.items():
        if param in optim.state:
            whole.state[param] = optim.state[param]
    found = full(model, whole)
    if expected is not None:
        compare(found, expected)
    return found


@pytest.mark.parametrize("wrapping", [None, {"policy": "blocks"}])
def test_one_optimizer_per_parameter(tmp_path: Path, wrapping: dict[str, Any] | None) -> None:
    """Keys are the parameters' numbers here, so the same parameters in the same order."""
    expected = run_ranks(_per_parameter, 4, str(tmp_path), wrapping, None)[0]
    other = {"policy": "linears"} if wrapping is None else None
    run_ranks(_per_parameter, 2, str(tmp_path), other, expected)


# ---------------------------------------------------------------- adapters


class _Lora(nn.Module):
    """A frozen linear layer and its low-rank update, which alone is trained."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.full((rank, base.in_features), 0.1))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def _adapted(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Mlp().requires_grad_(False)
    for block in model.blocks:
        block.up = _Lora(block.up)  # type: ignore[assignment]
    wrapped: Any = model
    if kind == "fsdp1":
        wrapped = wrap_fsdp1(model)
    elif kind == "fsdp2":
        wrapped = fully_shard(model)
    trained = [param for param in wrapped.parameters() if param.requires_grad]
    return wrapped, OPTIMIZERS["adamw"](trained)


def _adapters(rank: int, world: int, path: str, kind: str, saves: bool) -> Any:
    model, optim = _adapted(kind)
    if saves:
        train_steps(model, optim, 2)
        save(model, optim, path)
        fresh_model, fresh = _adapted(kind)
        assert_same(load(fresh_model, fresh, path), optim.state_dict())
    else:
        optim.load_state_dict(load(model, optim, path))
    return full(model, optim)["state"]


@pytest.mark.parametrize(("before", "after"), [("fsdp1", "fsdp2"), ("fsdp2", "fsdp1")])
def test_adapters_over_a_frozen_base(tmp_path: Path, before: str, after: str) -> None:
    expected = run_ranks(_adapters, 4, str(tmp_path), before, True)[0]
    names = {f"blocks.{n}.up.{part}" for n in (0, 1) for part in ("up", "down")}
    assert expected.keys() == names
    for found in run_ranks(_adapters, 2, str(tmp_path), after, False):
        assert_same(found, expected)
