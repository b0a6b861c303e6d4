"""State of a DTensor parameter of any shape and placement, and factored state of whole ones.

What is expected is computed from numbers: each element of a whole tensor is another one, and a
rank must have those that its placements say.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from dcp_fsdp_osd import FlatOptimLoadPlanner, FlatOptimState, verify_optim_state
from tests.breadth import always
from tests.models import Mlp, wrap_fsdp1
from tests.planners.checks import assert_same, load, save
from tests.ranks import RankError, run_ranks


class Holder(torch.optim.Optimizer):
    """Keeps the state that it is given."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise NotImplementedError


def numbers(shape: Any, first: int) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float32).view(tuple(shape)) + first


# name -> shape from the parameter's, and placement over a mesh of one dimension ("plain": none)
STATE: dict[str, tuple[Callable[[list[int]], list[int]], Any]] = {
    "like": (lambda s: s, "like"),
    "rows": (lambda s: [s[0], *[1] * (len(s) - 1)], Shard(0)),
    "columns": (lambda s: [1, *s[1:]], Replicate()),
    "vector": (lambda s: [s[0]], Shard(0)),
    "halved": (lambda s: [s[0], 3], Shard(1)),
    "cube": (lambda s: [2, s[0], 3], Shard(1)),
    "scalar": (lambda s: [], Replicate()),
    "replicated": (lambda s: s, Replicate()),
    "last_dim": (lambda s: s, "last"),
    "none": (lambda s: [0, 2], Shard(0)),
    "plain_scalar": (lambda s: [], "plain"),
    "plain_whole": (lambda s: s, "plain"),
}


def expected(param: torch.Tensor, mesh: DeviceMesh | None, number: int) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for i, (name, (shape_of, placement)) in enumerate(STATE.items()):
        whole = numbers(shape_of(list(param.shape)), 10_000 * (number + 1) + 500 * i)
        if placement == "last":
            placement = Shard(whole.dim() - 1)
        if placement == "plain" or mesh is None:
            state[name] = whole
        elif placement == "like":
            assert isinstance(param, DTensor)
            state[name] = distribute_tensor(whole, mesh, param.placements)
        else:
            state[name] = distribute_tensor(whole, mesh, [placement])
    return state


def _build(world: int, kind: str) -> tuple[nn.Module, Holder, DeviceMesh | None]:
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    mesh = None
    if kind != "plain":
        mesh = init_device_mesh(
            "cpu", (world,), mesh_dim_names=("dp" if kind == "fsdp2" else "tp",)
        )
    if kind == "fsdp2":
        fully_shard(model, mesh=mesh)
    elif kind == "tp":
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": ColwiseParallel()})
    return model, Holder(model.parameters()), mesh


def _give(optim: Holder, mesh: DeviceMesh | None, zero: bool = False) -> None:
    for number, param in enumerate(optim.param_groups[0]["params"]):
        optim.state[param] = expected(param, mesh, number)
        if zero:
            for value in optim.state[param].values():
                value.zero_()


def _check(loaded: dict[str, Any], model: nn.Module, mesh: DeviceMesh | None) -> None:
    for number, param in enumerate(model.parameters()):
        want = expected(param, mesh, number)
        assert loaded["state"][number].keys() == want.keys()
        for name, value in want.items():
            got = loaded["state"][number][name]
            assert type(got) is type(value), (name, type(got))
            if isinstance(value, DTensor):
                assert got.placements == value.placements, (name, got.placements)
                assert got.device_mesh == value.device_mesh
                assert got.shape == value.shape and got.stride() == value.stride()
            assert_same(got, value)


def _save(rank: int, world: int, path: str, kind: str) -> None:
    model, optim, mesh = _build(world, kind)
    _give(optim, mesh)
    save(model, optim, path)
    stock = {"optim": get_optimizer_state_dict(model, optim)}
    dcp.load(stock, storage_reader=FileSystemReader(path))  # which reads it too
    _load(rank, world, path, kind)
    _give(optim, mesh)
    assert verify_optim_state(model, optim, path).ok
    state = optim.state[next(model.parameters())]
    for value in state.values():
        if value is not None:
            value.add_(1)
    found = {(each.fqn, each.state) for each in verify_optim_state(model, optim, path)}
    assert found == {("0.weight", name) for name in STATE if name != "none"}


def _load(rank: int, world: int, path: str, kind: str) -> None:
    model, optim, mesh = _build(world, kind)
    _check(load(model, optim, path), model, mesh)
    if mesh is not None:
        form = load(model, optim, path, form="sharded")
        named = dict(model.named_parameters())
        by_number = {i: form["state"][name] for i, name in enumerate(named)}
        _check({"state": by_number}, model, mesh)
    full = load(model, optim, path, form="full")
    for name, (i, param) in zip(
        dict(model.named_parameters()), enumerate(model.parameters()), strict=True
    ):
        assert_same(full["state"][name], expected(param, None, i))
    _give(optim, mesh, zero=True)
    _check(load(model, optim, path, into=optim.state_dict()), model, mesh)
    _check(optim.state_dict(), model, mesh)  # in place
    _give(optim, mesh, zero=True)
    dcp.load(
        {"optim": FlatOptimState(model, optim)},
        storage_reader=FileSystemReader(path),
        planner=FlatOptimLoadPlanner(model, optim),
    )
    _check(optim.state_dict(), model, mesh)


@pytest.mark.parametrize("kind", always(["fsdp2"], ["fsdp2", "tp"]))
def test_dtensor_state_of_any_shape_and_placement(tmp_path: Path, kind: str) -> None:
    run_ranks(_save, 2, str(tmp_path / "2"), kind)
    run_ranks(_save, 1, str(tmp_path / "1"), kind)
    run_ranks(_load, 3, str(tmp_path / "2"), kind)
    run_ranks(_load, 2, str(tmp_path / "1"), kind)
    run_ranks(_load, 1, str(tmp_path / "2"), kind)
    run_ranks(_load, 2, str(tmp_path / "2"), "tp" if kind == "fsdp2" else "fsdp2")
    run_ranks(_load, 1, str(tmp_path / "2"), "plain")


def _two_dims(rank: int, world: int, path: str) -> None:
    """FSDP2 over tensor parallelism; state on one of the mesh's dimensions alone."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def build() -> tuple[nn.Module, Holder]:
        model = nn.Sequential(nn.Linear(5, 8, bias=False))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        return model, Holder(model.parameters())

    model, optim = build()
    (param,) = model.parameters()
    assert isinstance(param, DTensor) and param.device_mesh.ndim == 2
    like = distribute_tensor(numbers((8, 5), 0), mesh, [Replicate(), Replicate()])
    want = {
        "like": like.redistribute(mesh, param.placements),
        "sub": distribute_tensor(numbers((8, 1), 100), mesh["tp"], [Shard(0)]),
        "other": distribute_tensor(numbers((4,), 200), mesh["dp"], [Shard(0)]),
        "both": distribute_tensor(numbers((8, 3), 300), mesh, [Shard(0), Replicate()]),
        "crossed": distribute_tensor(numbers((8, 5), 400), mesh, [Shard(1), Shard(0)]),
    }
    optim.state[param] = want
    save(model, optim, path)
    for live in (False, True):
        fresh_model, fresh = build()
        into = {}
        if live:
            (mine,) = fresh_model.parameters()
            fresh.state[mine] = {name: value.clone().zero_() for name, value in want.items()}
            into = fresh.state_dict()
        loaded = load(fresh_model, fresh, path, into=into)["state"][0]
        for name, value in want.items():
            got = loaded[name]
            assert got.placements == value.placements and got.device_mesh == value.device_mesh
            assert_same(got, value)
    assert verify_optim_state(model, optim, path).ok


def test_state_over_two_dimensions(tmp_path: Path) -> None:
    run_ranks(_two_dims, 4, str(tmp_path))


def _partial(rank: int, world: int, path: str) -> None:
    model, optim, mesh = _build(world, "fsdp2")
    assert mesh is not None
    for param in model.parameters():
        summand = torch.full(param.shape, float(rank))
        from torch.distributed.tensor import Partial

        optim.state[param] = {"sum": DTensor.from_local(summand, mesh, [Partial()])}
    save(model, optim, path)


def test_summands_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="is a summand, no part of the tensor") as caught:
        run_ranks(_partial, 2, str(tmp_path))
    assert caught.value.all_raised("LayoutError")


# ---------------------------------------------------------------- whole parameters, from stock


def _factored(kind: str, param: torch.Tensor, n: int) -> dict[str, Any]:
    """State as optimizers of that kind keep it for a parameter."""
    rows, columns = param.shape[0], param.shape[-1]
    state: dict[str, Any] = {"step": torch.tensor(3.0)}
    if param.dim() < 2:
        state["exp_avg_sq"] = numbers(param.shape, n)
        return state
    if kind in ("adafactor", "came"):  # of transformers
        state["exp_avg_sq_row"] = numbers((rows,), n)
        state["exp_avg_sq_col"] = numbers((columns,), n + 100)
    if kind in ("came", "soap", "prodigy", "kron"):
        state["exp_avg"] = numbers(param.shape, n + 200)
    if kind in ("shampoo", "soap"):
        state["GG"] = [numbers((rows, rows), n + 300), numbers((columns, columns), n + 400)]
    if kind == "kron":
        state["Q"] = [numbers((rows, rows), n + 300), numbers((columns,), n + 400)]
    if kind in ("prodigy", "blocks"):
        state["s"] = numbers((math.ceil(param.numel() / 11),), n + 500)
    return state


class Square(Mlp):
    """Most weights are square, as those of attention are."""

    def __init__(self) -> None:
        super().__init__(width=6, hidden=6)


def _holder(model: nn.Module, kind: str, names: list[str]) -> Holder:
    optim = Holder(model.parameters())
    for number, param in enumerate(optim.param_groups[0]["params"]):
        optim.state[param] = _factored(kind, param, 10_000 * number)
    return optim


KINDS = ["adafactor", "came", "shampoo", "soap", "prodigy", "kron", "blocks"]


@pytest.mark.each_value
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [Mlp, Square])
def test_factored_state_of_stock_checkpoints(tmp_path: Path, kind: str, make: Any) -> None:
    model = make()
    optim = _holder(model, kind, [])
    want = copy.deepcopy(optim.state_dict()["state"])
    stock = {"optim": get_optimizer_state_dict(model, optim)}
    dcp.save(stock, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    fresh = Holder(model.parameters())
    if kind == "blocks":  # nothing says whose the shape is
        with pytest.raises(dcp.api.CheckpointException, match="load in place, into optim"):
            load(model, fresh, tmp_path)
    else:
        assert_same(load(model, fresh, tmp_path)["state"], want)
    fresh = _holder(model, kind, [])
    for state in fresh.state.values():
        for value in state.values():
            for tensor in value if isinstance(value, list) else [value]:
                tensor.zero_()
    load(model, fresh, tmp_path, into=fresh.state_dict())
    assert_same(fresh.state_dict()["state"], want)
    run_ranks(_no_shard, 2, str(tmp_path), kind, make, want)


def _no_shard(rank: int, world: int, path: str, kind: str, make: Any, want: Any) -> None:
    """NO_SHARD holds whole parameters; a shard of them cannot take factors."""
    if kind == "blocks":
        return
    model = wrap_fsdp1(make(), strategy="NO_SHARD")
    assert_same(load(model, Holder(model.parameters()), path)["state"], want)
    model = wrap_fsdp1(make())
    try:
        load(model, Holder(model.parameters()), path)
    except BaseException as error:
        text = str(error)
    else:
        raise AssertionError("a shard was loaded")
    assert "cannot be cut for the current layout" in text


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_state_of_a_parameter_of_another_shape_is_not_factored(tmp_path: Path, name: str) -> None:
    """One layer's shape has changed, to one whose numbers are the same or fewer."""
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    optim = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 6)).sum().backward()
    optim.step()
    stock = {"optim": get_optimizer_state_dict(model, optim)}
    dcp.save(stock, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    other = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    if name == "weight":
        other[0].weight = nn.Parameter(torch.ones(4, 6).t().contiguous())
    else:
        other[0].bias = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(dcp.api.CheckpointException, match=f"0.{name}.exp_avg: shape"):
        load(other, torch.optim.AdamW(other.parameters()), tmp_path)
