"""A full state that rank 0 alone holds becomes every rank's flat state; judged by stock."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh

from dcp_fsdp_osd import FlatOptimLoadPlanner, FullStateReader
from tests.exchange.jobs import wrapped
from tests.models import MODELS, Mlp, full_state, train_steps, wrap_fsdp1
from tests.planners.checks import OPTIMIZERS, assert_same, make
from tests.planners.test_interop import build, compare, full
from tests.ranks import RankError, run_ranks
from tests.torch_gaps import needs_groups_without_rank_0


def _load(model: Any, optim: Any, reader: FullStateReader, **options: Any) -> Any:
    state: dict[str, Any] = {"optim": {}}
    planner = FlatOptimLoadPlanner(model, optim, **options)
    dcp.load(state, storage_reader=reader, planner=planner)
    return state["optim"], planner


def _fsdp1(rank: int, world: int, path: str, kwargs: dict[str, Any], as_file: bool) -> Any:
    model, optim = make(**kwargs)
    expected = full_state(model, optim)
    source: Any = expected if rank == 0 else None
    if as_file:
        source = f"{path}/optim.pt" if rank == 0 else None
        if rank == 0:
            torch.save({"optim": expected, "epoch": 3}, source)
    before = copy.deepcopy(expected) if rank == 0 else None
    fresh, fresh_optim = make(**{**kwargs, "steps": 0})
    loaded, planner = _load(fresh, fresh_optim, FullStateReader(source))
    fresh_optim.load_state_dict(loaded)
    assert_same(full_state(fresh, fresh_optim)["state"], expected["state"])
    stats = planner.exchanged
    if rank == 0 and not as_file:
        assert_same(source, before)
    return None if stats is None else (stats.sent, stats.received)


@pytest.mark.each_value
@pytest.mark.parametrize("as_file", [True, False])
@pytest.mark.parametrize(
    "kwargs",
    [
        {"use_orig_params": True},
        {"use_orig_params": False, "model": "odd"},
        {"strategy": "NO_SHARD", "optim": "momentum"},
        {"model": "tied", "policy": "root", "optim": "adafactor", "strategy": "NO_SHARD"},
    ],
    ids=["orig", "odd_flat", "no_shard", "adafactor"],
)
def test_fsdp1(tmp_path: Path, kwargs: dict[str, Any], as_file: bool) -> None:
    results = run_ranks(_fsdp1, 4, str(tmp_path), kwargs, as_file)
    assert [sent > 0 for sent, _ in results] == [True, False, False, False]


def _keeps(rank: int, world: int) -> tuple[int, int, int]:
    model = wrap_fsdp1(Mlp(width=100, hidden=300))
    optim = OPTIMIZERS["adamw"](model.parameters())
    train_steps(model, optim, 1)
    expected = full_state(model, optim)
    loaded, planner = _load(model, optim, FullStateReader(expected if rank == 0 else None))
    optim.load_state_dict(loaded)
    assert_same(full_state(model, optim)["state"], expected["state"])
    kept = sum(t.nbytes for s in loaded["state"].values() for t in s.values() if t.dim())
    return planner.exchanged.sent, planner.exchanged.received, kept


def test_a_rank_receives_what_it_keeps() -> None:
    results = run_ranks(_keeps, 4)
    small = 32_000  # scalars and options, which all ranks want
    for rank, (sent, received, kept) in enumerate(results):
        if rank:
            assert sent == 0
            assert kept > 5 * small
            assert kept <= received <= kept + small
    others = sum(kept for _, _, kept in results[1:])
    assert others <= results[0][0] <= others + small


def test_one_rank(tmp_path: Path) -> None:
    assert run_ranks(_fsdp1, 1, str(tmp_path), {}, True) == [None]


def _other(rank: int, world: int, kind: str) -> None:
    model, optim = build("fsdp1", world)
    train_steps(model, optim, 2)
    expected = full(model, optim)
    source: Any = expected if rank == 0 else None
    if kind == "hsdp":
        fresh, fresh_optim = wrapped("hsdp", world, steps=0)
    else:
        fresh, fresh_optim = build(kind, world)
    loaded, _ = _load(fresh, fresh_optim, FullStateReader(source))
    fresh_optim.load_state_dict(loaded)
    compare(full(fresh, fresh_optim), expected)


@pytest.mark.parametrize("kind", ["fsdp2", "ddp", "fsdp1_dtensor", "hsdp"])
def test_other_kinds(kind: str) -> None:
    run_ranks(_other, 4, kind)


def _subgroup(rank: int, world: int) -> None:
    group = dist.new_group([2, 3])
    if rank < 2:
        return
    mesh = wrap_fsdp1(MODELS["mlp"](), process_group=group)
    optim = OPTIMIZERS["adamw"](mesh.parameters())
    whole = MODELS["mlp"]()
    ref = OPTIMIZERS["adamw"](whole.parameters())
    train_steps(whole, ref, 2)
    names = dict(enumerate(n for n, _ in whole.named_parameters()))
    flat = ref.state_dict()
    source = {
        "state": {names[i]: s for i, s in flat["state"].items()},
        "param_groups": [{**g, "params": list(names.values())} for g in flat["param_groups"]],
    }
    state: dict[str, Any] = {"optim": {}}
    dcp.load(
        state,
        storage_reader=FullStateReader(source if rank == 2 else None, process_group=group),
        planner=FlatOptimLoadPlanner(mesh, optim),
        process_group=group,
    )
    optim.load_state_dict(state["optim"])
    train_steps(mesh, optim, 1)


@needs_groups_without_rank_0
def test_subgroup() -> None:
    run_ranks(_subgroup, 4)


class _OddError(Exception):
    """Can be neither pickled nor shown."""

    def __reduce__(self) -> Any:
        raise TypeError

    def __str__(self) -> str:
        raise TypeError


class _Failing(dict[str, Any]):
    def items(self) -> Any:
        raise _OddError


def _fails(rank: int, world: int, path: str, kind: str) -> None:
    init_device_mesh("cpu", (world,))
    model, optim = make(steps=0)
    reader = FullStateReader(f"{path}/{kind}.pt" if rank == 0 else None)
    if kind == "none":
        reader = FullStateReader(None)
    if kind == "odd error":
        reader = FullStateReader(_Failing({"optim": {}}) if rank == 0 else None)
    if kind == "stock":
        state = {"optim": {"state": {"x": torch.zeros(3)}, "param_groups": []}}
        full_reader = FullStateReader(copy.deepcopy(state) if rank == 0 else None)
        dcp.load(state, storage_reader=full_reader)
        return
    _load(model, optim, reader)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("missing", "no file of a full state"),
        ("text", "expected a file written by torch.save"),
        ("code", "expected tensors and plain values alone"),
        ("list", "expected a state dict, found list"),
        ("none", "found None"),
        ("stock", "pass planner=FlatOptimLoadPlanner"),
        ("odd error", "an error that cannot be shown"),
    ],
)
def test_errors_reach_every_rank(tmp_path: Path, kind: str, expected: str) -> None:
    (tmp_path / "text.pt").write_text("no checkpoint")
    torch.save({"optim": Path("x")}, tmp_path / "code.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(RankError) as caught:
        run_ranks(_fails, 2, str(tmp_path), kind)
    assert caught.value.all_raised("CheckpointException")
    assert expected in str(caught.value)
