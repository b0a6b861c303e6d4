"""Every layout to every layout, between any world sizes: the table of ``docs/layouts.md``.

The state has a distinct value in every element.  Stock PyTorch (``set_optimizer_state_dict``)
cuts the whole tensors for each layout; what our planners load must be that to the bit, on every
rank, whichever layout and world size it was saved under.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from tests import ranks
from tests.models import Odd, train_steps, wrap_fsdp1
from tests.planners.checks import OPTIMIZERS, differences, load, raw, save
from tests.ranks import run_ranks

_FULL = StateDictOptions(full_state_dict=True)


def _fsdp1(world: int, *, mesh: bool, **options: Any) -> nn.Module:
    if mesh:
        options["device_mesh"] = ranks.mesh(world)
    return wrap_fsdp1(Odd(), **options)


def _hybrid1(world: int, **options: Any) -> nn.Module:
    mesh = ranks.mesh(2, world // 2, names=("replicate", "shard"))
    return wrap_fsdp1(Odd(), strategy="HYBRID_SHARD", device_mesh=mesh, **options)


def _fsdp2(world: int, *, hybrid: bool = False, **options: Any) -> nn.Module:
    shape = (2, world // 2) if hybrid else (world,)
    names = ("replicate", "shard")[-len(shape) :]
    mesh = ranks.mesh(*shape, names=names)
    model = Odd()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def _other_dims(world: int) -> nn.Module:
    """Shard the last dimension that can be cut evenly (FSDP2 cuts only dimension 0 unevenly)."""

    def place(param: nn.Parameter) -> Shard:
        even = [d for d, size in enumerate(param.shape) if size % world == 0]
        return Shard(even[-1] if even else 0)

    return _fsdp2(world, shard_placement_fn=place)


def _from_meta(world: int) -> nn.Module:
    values = Odd().state_dict()
    with torch.device("meta"):
        model = Odd()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    model.to_empty(device="cpu")
    set_model_state_dict(model, values, options=_FULL)
    return model


Build = Callable[[int], nn.Module]

LAYOUTS: dict[str, Build] = {
    "FSDP1": lambda world: _fsdp1(world, mesh=False),
    "FSDP1, mesh": lambda world: _fsdp1(world, mesh=True),
    "FSDP1 flat": lambda world: _fsdp1(world, mesh=False, use_orig_params=False),
    "FSDP1 flat, mesh": lambda world: _fsdp1(world, mesh=True, use_orig_params=False),
    "FSDP2": _fsdp2,
    "DDP": lambda world: DistributedDataParallel(Odd()),
    "one process": lambda world: Odd(),
}
"""Saved and loaded in all pairs.  *flat*: ``use_orig_params=False``; *mesh*: stock's sharded
values are DTensors, without it ShardedTensors; *one process* has no process group."""

VARIANTS: dict[str, Build] = {
    "FSDP1, hybrid": _hybrid1,
    "FSDP1 flat, hybrid": lambda world: _hybrid1(world, use_orig_params=False),
    "FSDP1, NO_SHARD": lambda world: _fsdp1(world, mesh=False, strategy="NO_SHARD"),
    "FSDP2, hybrid": lambda world: _fsdp2(world, hybrid=True),
    "FSDP2, other dimensions": _other_dims,
    "FSDP2, kept unsharded": lambda world: _fsdp2(world, reshard_after_forward=False),
    "FSDP2, bfloat16": lambda world: _fsdp2(
        world, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    ),
    "FSDP2, from meta": _from_meta,
    "FSDP2, CPU offload": lambda world: _fsdp2(
        world, offload_policy=CPUOffloadPolicy(pin_memory=False)
    ),
}
"""Saved for, and loaded from, :data:`LAYOUTS` and each other."""

_TABLES = {**LAYOUTS, **VARIANTS}


def _layouts(table: Iterable[str], world: int) -> list[str]:
    """Those that exist at a world size; 0 stands for no process group."""
    names = [n for n in table if (n == "one process") == (world == 0)]
    return [n for n in names if "hybrid" not in n or world >= 4]


def _values(optim: str) -> dict[str, Any]:
    """Whole tensors under FQNs, each element another value."""
    numbers = itertools.count()
    names = {"adamw": ("exp_avg", "exp_avg_sq"), "momentum": ("momentum_buffer",)}[optim]
    state: dict[str, dict[str, torch.Tensor]] = {}
    for fqn, param in Odd().named_parameters():
        state[fqn] = {
            name: torch.arange(param.numel()).view(param.shape) * 1e-3 + 1 + next(numbers)
            for name in names
        }
        if optim == "adamw":
            state[fqn]["step"] = torch.tensor(7.0)
    group = OPTIMIZERS[optim]([nn.Parameter(torch.zeros(1))]).state_dict()["param_groups"][0]
    return {"state": state, "param_groups": [{**group, "params": list(state), "lr": 0.125}]}


def _by_stock(model: nn.Module, optim: str) -> torch.optim.Optimizer:
    """An optimizer with :func:`_values`, cut for the model's layout by stock PyTorch."""
    optimizer = OPTIMIZERS[optim](model.parameters())
    set_optimizer_state_dict(model, optimizer, _values(optim), options=_FULL)
    return optimizer


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _elements(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Without what stock keeps for parameters of which this rank has no element."""
    state = {}
    for key, values in state_dict["state"].items():
        sizes = [
            _local(v).numel() for v in values.values() if isinstance(v, torch.Tensor) and v.dim()
        ]
        if any(sizes):
            state[key] = values
    return {"state": state, "param_groups": state_dict["param_groups"]}


def _name(layout: str, world: int, optim: str) -> str:
    return re.sub(r"\W+", "-", f"{layout} {world} {optim}")


def _save_all(rank: int, world: int, path: str, layouts: list[str], optims: list[str]) -> None:
    for name, optim in itertools.product(layouts, optims):
        model = _TABLES[name](world)
        save(model, _by_stock(model, optim), f"{path}/{_name(name, world, optim)}")


def _load_all(rank: int, world: int, layouts: list[str], parts: list[list[tuple[str, str]]]) -> int:
    """Load (optimizer, path) under each layout, of one part after the other in turn; how many
    loads that were."""
    count = 0
    turns = zip(layouts, itertools.cycle(parts), strict=False)
    pairs = [(name, part, optim) for name, part in turns for optim in dict(part)]
    for name, part, optim in pairs:
        model = _TABLES[name](world)
        expected = _elements(_by_stock(model, optim).state_dict())
        for path in (path for kind, path in part if kind == optim):
            fresh = OPTIMIZERS[optim](model.parameters())
            found = differences(_elements(load(model, fresh, path)), expected)
            assert not found, (name, path, found[:5])
            count += 1
    return count


def _run(function: Callable[..., Any], world: int, *args: Any) -> Any:
    if world == 0:  # this process, which has no process group
        return function(0, 0, *args)
    return run_ranks(function, world, *args, timeout=300)[0]


def _checkpoints(
    path: Path, table: Iterable[str], worlds: Sequence[int], optims: list[str]
) -> list[tuple[str, str]]:
    saved = []
    for world in worlds:
        layouts = _layouts(table, world)
        _run(_save_all, world, str(path), layouts, optims)
        saved += [
            (optim, f"{path}/{_name(layout, world, optim)}")
            for layout, optim in itertools.product(layouts, optims)
        ]
    return saved


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("of", [pytest.param(1, marks=pytest.mark.slow), 6])
def test_every_layout_to_every_layout(tmp_path: Path, of: int) -> None:
    """Each layout at each world size from every ``of``-th checkpoint, so that each is loaded."""
    worlds = (0, 1, 2, 4) if of == 1 else (0, 2, 4)
    saved = _checkpoints(tmp_path, LAYOUTS, worlds, ["adamw"])
    places = (len(worlds) - 1) * (len(LAYOUTS) - 1) + 1
    assert len(saved) == places
    expected = loads = 0
    for number, world in enumerate(worlds):
        names = _layouts(LAYOUTS, world)
        parts = [saved[first::of] for first in range(of)]
        if of > 1:
            parts = parts[number % of :] + parts[: number % of]
        loads += _run(_load_all, world, names, parts)
        expected += sum(len(parts[n % of]) for n in range(len(names)))
    assert loads == expected
    if of == 1:
        assert loads == places * places
    saved = _checkpoints(tmp_path, LAYOUTS, (0, 2), ["momentum"])  # has no scalars
    loads = sum(_run(_load_all, world, [f"FSDP{world // 2}"], [saved]) for world in (2, 4))
    assert loads == 2 * len(LAYOUTS)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.slow  # beside the layouts to each other
@pytest.mark.parametrize("worlds", [(2, 4)], ids=str)
def test_variants_to_and_fro(tmp_path: Path, worlds: tuple[int, ...]) -> None:
    """Each variant to the layouts, from the layouts, and to other variants and world sizes."""
    variants = _checkpoints(tmp_path, VARIANTS, worlds, ["adamw"])
    layouts = _checkpoints(tmp_path, ["FSDP1 flat", "one process"], (0, 4), ["adamw"])
    halves = [variants[::2], variants[1::2]]
    _run(_load_all, 0, ["one process"], [variants])
    _run(_load_all, 2, ["FSDP1", "FSDP2"], halves)
    for world in worlds:
        parts = [variants[world // 4 :: 6], layouts[:1], layouts[1:]]
        _run(_load_all, world, _layouts(VARIANTS, world), parts)


def _next_steps(rank: int, world: int, path: str, table: list[str]) -> None:
    for name in _layouts(table, world):
        model, fresh_model = _TABLES[name](world), _TABLES[name](world)
        # DDP adds up gradients in other buckets, so in another order, in its very first step.
        train_steps(fresh_model, torch.optim.SGD(fresh_model.parameters(), lr=0.0), 1)
        for optim in [OPTIMIZERS[n] for n in ("adamw", "momentum")[: 1 + ("FSDP1" in name)]]:
            optimizer = optim(model.parameters())
            train_steps(model, optimizer, 2)
            where = f"{path}/{_name(name, world, type(optimizer).__name__)}"
            save(model, optimizer, where)
            with torch.no_grad():
                for to, by in zip(fresh_model.parameters(), model.parameters(), strict=True):
                    _local(to).copy_(_local(by))
            fresh = optim(fresh_model.parameters())
            fresh.load_state_dict(load(fresh_model, fresh, where))
            losses = train_steps(model, optimizer, 2, first=2)
            assert train_steps(fresh_model, fresh, 2, first=2) == losses, name
            for one, two in zip(fresh_model.parameters(), model.parameters(), strict=True):
                assert raw(_local(one)) == raw(_local(two)), name


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("world", "table"),
    [(0, LAYOUTS), (4, LAYOUTS), pytest.param(4, VARIANTS, marks=pytest.mark.slow)],
    ids=["no group", "layouts", "variants"],
)
def test_the_next_steps_are_those_of_a_run_that_never_stopped(
    tmp_path: Path, world: int, table: dict[str, Build]
) -> None:
    _run(_next_steps, world, str(tmp_path), list(table))


def test_the_table_in_the_docs_names_every_layout() -> None:
    text = (Path(__file__).parents[2] / "docs" / "layouts.md").read_text()
    rows = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("|")]
    missing = [name for name in [*LAYOUTS, *VARIANTS] if name not in rows]
    assert not missing
