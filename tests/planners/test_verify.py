"""verify_optim_state and verify_model_state find every difference, and nothing else."""

from __future__ import annotations

import itertools
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

from benchmarks.heap import release_freed_memory
from benchmarks.measure import PeakMemory
from benchmarks.wire import WireBytes
from dcp_fsdp_osd import (
    Difference,
    FlatModelState,
    FlatOptimSavePlanner,
    FlatOptimState,
    StreamingReader,
    StreamingWriter,
    Verification,
    verify_model_state,
    verify_optim_state,
)
from dcp_fsdp_osd.verify.elements import Ranges, differing
from tests.breadth import always
from tests.models import Mlp, adamw, inner, train_steps, wrap_fsdp1
from tests.planners.checks import OPTIMIZERS, assert_same
from tests.planners.test_model_state import KINDS, Rich, wrap, wrap_rich
from tests.ranks import RankError, run_ranks


def save(model: nn.Module, optim: torch.optim.Optimizer, path: str) -> None:
    state = {"model": FlatModelState(model), "optim": FlatOptimState(model, optim)}
    planner = FlatOptimSavePlanner(model, optim)
    dcp.save(state, storage_writer=StreamingWriter(path, fsync=False), planner=planner)


# ------------------------------------------------------------------- nothing differs


def _same(rank: int, world: int, path: str, kind: str, optim: str) -> None:
    model = wrap(kind, Mlp(), world)
    optimizer = OPTIMIZERS[optim](model.parameters())
    train_steps(model, optimizer, 2)
    save(model, optimizer, path)
    with WireBytes() as wire:
        assert verify_model_state(model, path).ok
        assert verify_optim_state(model, optimizer, path).ok
    assert wire.tensors < 4096
    state = {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer),
    }
    dcp.save(state, storage_writer=FileSystemWriter(path + "-stock"))
    reader = FileSystemReader(path + "-stock")
    assert verify_model_state(model, reader).ok
    assert verify_optim_state(model, optimizer, reader).ok
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    if optim != "tensor_lr":  # which stock cannot flatten
        flat = {"optim": get_optimizer_state_dict(model, optimizer, options=options)}
        dcp.save(flat, storage_writer=FileSystemWriter(path + "-flat"))
        assert verify_optim_state(model, optimizer, path + "-flat").ok


@pytest.mark.parametrize("kind", always(["fsdp1_flat", "hybrid"], KINDS))
def test_nothing_differs(tmp_path: Path, kind: str) -> None:
    world = 1 if kind == "plain" else 4 if kind == "hybrid" else 2
    run_ranks(_same, world, str(tmp_path / "save"), kind, "amsgrad")


@pytest.mark.parametrize(
    "optim",
    always(
        ["sgd", "tensor_lr", "adafactor"], ["momentum", "sgd", "tensor_lr", "adagrad", "adafactor"]
    ),
)
def test_optimizers(tmp_path: Path, optim: str) -> None:
    run_ranks(_same, 2, str(tmp_path / "save"), "fsdp1_dtensor", optim)


def _other_layout(rank: int, world: int, path: str, use_orig_params: bool) -> None:
    model = wrap_fsdp1(Mlp(), policy="root", use_orig_params=use_orig_params)
    assert verify_model_state(model, path).ok
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)
    whole = {name: value.numel() for name, value in Mlp().state_dict().items()}
    found: dict[str, int] = {}
    for difference in verify_model_state(model, path):
        found[difference.fqn] = found.get(difference.fqn, 0) + difference.elements
    assert found == whole


def _plain_save(rank: int, world: int, path: str) -> None:
    model = wrap_fsdp1(Mlp())
    save(model, adamw(model), path)


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_at_another_layout(tmp_path: Path, use_orig_params: bool) -> None:
    run_ranks(_plain_save, 3, str(tmp_path))
    run_ranks(_other_layout, 2, str(tmp_path), use_orig_params)


# ------------------------------------------------------------------- something differs


def _damage(rank: int, world: int, path: str) -> list[Any]:
    """Differences whose places are known."""
    model = wrap_fsdp1(Mlp(), policy="linears")
    optim = adamw(model)
    train_steps(model, optim, 1)
    weight = inner(inner(model).first).weight
    state = optim.state[weight]
    state["exp_avg"][2] = math.nan
    save(model, optim, path)
    before = {k: v.clone() for k, v in state.items()}
    assert verify_optim_state(model, optim, path).ok  # a NaN is itself
    assert_same(state, before)
    found = []
    if rank == 1:
        state["exp_avg_sq"][3:5] += 1
        state["exp_avg_sq"][9] += 1
        state["exp_avg"].view(torch.int32)[2] += 1  # another NaN
        state["exp_avg"][5] = -state["exp_avg"][5]
    found.append(list(verify_optim_state(model, optim, path)))
    found.append(list(verify_optim_state(model, optim, path, max_ranges=1)))
    for group in optim.param_groups:
        group["lr"] = 0.25
        group["new"] = None
    state["step"] += 1
    del state["exp_avg_sq"]
    state["other"] = torch.zeros(2)
    state["exp_avg"] = state["exp_avg"].double()
    del optim.state[inner(inner(model).last).weight]
    found.append(list(verify_optim_state(model, optim, path)))
    return found


def _stateless(rank: int, world: int, path: str, use_orig_params: bool) -> None:
    """State on one side alone."""
    model = wrap_fsdp1(Mlp(), use_orig_params=use_orig_params)
    optim = adamw(model)
    fresh = adamw(model)
    train_steps(model, optim, 1)
    save(model, fresh, path + "/empty")
    save(model, optim, path + "/full")
    sides = ((fresh, "full", "in the checkpoint, but not here"), (optim, "empty", UNSAVED))
    for live, place, what in sides:
        found = verify_optim_state(model, live, f"{path}/{place}")
        assert {d.what for d in found} == {what}
        assert {d.state for d in found} == {"exp_avg", "exp_avg_sq", "step"}
        if use_orig_params or place == "full":
            assert {d.fqn for d in found} == set(Mlp().state_dict())


UNSAVED = "not in the checkpoint"


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_state_on_one_side(tmp_path: Path, use_orig_params: bool) -> None:
    run_ranks(_stateless, 2, str(tmp_path), use_orig_params)


def test_differences_of_an_optimizer(tmp_path: Path) -> None:
    results = run_ranks(_damage, 2, str(tmp_path))
    assert results[0] == results[1]
    (first, joined, rest) = results[0]
    size = 21  # elements of the weight, of 36, and of 42 with its bias
    assert [(d.fqn, d.state, d.ranks, d.elements) for d in first] == [
        ("first.weight", "exp_avg", (1,), 2),
        ("first.weight", "exp_avg_sq", (1,), 3),
    ]
    assert first[0].ranges == ((size + 2, size + 3), (size + 5, size + 6))
    assert first[1].ranges == ((size + 3, size + 5), (size + 9, size + 10))
    assert [d.ranges for d in joined] == [((size + 2, size + 6),), ((size + 3, size + 10),)]
    both = (0, 1)
    assert {(d.fqn, d.state, d.ranks) for d in rest} == {
        ("first.weight", "exp_avg", both),
        ("first.weight", "exp_avg_sq", both),
        ("first.weight", "step", both),
        ("first.weight", "other", both),
        ("last.weight", "exp_avg", both),
        ("last.weight", "exp_avg_sq", both),
        ("last.weight", "step", both),
        ("param_groups.0", "lr", both),
        ("param_groups.0", "new", both),
    }
    words = {(d.fqn, d.state): d.what for d in rest}
    assert words["param_groups.0", "lr"] == "0.01 in the checkpoint, 0.25 here"
    assert words["first.weight", "other"] == "not in the checkpoint"
    assert words["first.weight", "exp_avg_sq"] == "in the checkpoint, but not here"
    assert "float32 in the checkpoint" in words["first.weight", "exp_avg"]
    assert str(first[0]) == (
        f"first.weight.exp_avg: 2 elements differ: [{size + 2}:{size + 3}] "
        f"[{size + 5}:{size + 6}] (ranks 1)"
    )


def _damaged_model(rank: int, world: int, path: str) -> list[Difference]:
    model = wrap_rich(Rich(seed=1))
    save(model, adamw(model), path)
    assert verify_model_state(model, path).ok
    rich = inner(model)
    with torch.no_grad():
        if rank == 1:
            rich.table[1, 2] += 1
        rich.scale += 1
        rich.apart.bias[1:3] += 1
    rich.object.extra["recipe"] = "other"
    rich.register_buffer("late", torch.zeros(2))
    rich.norm.running_var = torch.zeros(6, dtype=torch.float64)
    del rich.norm.running_mean
    return list(verify_model_state(model, path))


def test_differences_of_a_model(tmp_path: Path) -> None:
    results = run_ranks(_damaged_model, 2, str(tmp_path))
    assert results[0] == results[1]
    found = {d.fqn: (d.ranks, d.ranges) for d in results[0]}
    assert found == {
        "table": ((1,), ((7, 8),)),
        "scale": ((0, 1), ((0, 1),)),
        "apart.bias": ((0, 1), ((1, 3),)),
        "object._extra_state": ((0, 1), ()),
        "late": ((0, 1), ()),
        "norm.running_var": ((0, 1), ()),
        "norm.running_mean": ((0, 1), ()),
    }


# ------------------------------------------------------------------- failures, memory


def _fails(rank: int, world: int, path: str, what: str) -> None:
    model = wrap_fsdp1(Mlp())
    save(model, adamw(model), path)
    dist.barrier()
    if what == "file" and rank == 0:
        next(Path(path).glob("*.distcp")).unlink()
    dist.barrier()
    if what == "comparing":
        optim = adamw(model)
        optim.param_groups[0]["lr"] = _NoRepr() if rank else 0.01
        verify_optim_state(model, optim, path)
    if what == "one rank":
        other = wrap_fsdp1(Mlp())
        verify_optim_state(model, adamw(other if rank else model), path)
    verify_model_state(model, path + "-nowhere" if what == "absent" else path)


class _NoRepr:
    """A live option that cannot be told."""

    def __repr__(self) -> str:
        raise RuntimeError("no words for it")


@pytest.mark.parametrize("what", ["absent", "file", "one rank", "comparing"])
def test_every_rank_raises(tmp_path: Path, what: str) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(_fails, 2, str(tmp_path / "save"), what)
    comparing = what == "comparing"
    assert caught.value.all_raised("FlatOptimError" if comparing else "CheckpointException")
    text = {"comparing": "rank 1: RuntimeError: no words for it"}
    text |= {"one rank": "LayoutError", "absent": "no checkpoint at", "file": "CorruptCheckpoint"}
    assert text[what] in str(caught.value)


class _Large(nn.Module):
    """96 MiB of parameters, so 192 MiB of state."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(1024, 4096) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def _memory(rank: int, world: int, path: str) -> list[int]:
    model = wrap_fsdp1(_Large(), policy="root")
    optim = adamw(model)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optim.step()
    optim.zero_grad()
    save(model, optim, path)
    extra = []
    for wrong in (False, True):
        if wrong:
            for state in optim.state.values():
                state["exp_avg"] += 1
        release_freed_memory()
        with PeakMemory() as peak:
            found = verify_optim_state(model, optim, path)
        assert found.ok != wrong
        extra.append(peak.extra)
    return extra


def test_memory_is_bounded(tmp_path: Path) -> None:
    (extra,) = run_ranks(_memory, 1, str(tmp_path))
    assert max(extra) < 96 << 20, extra  # reads of 32 MiB at a time, and the allocator's slack


def test_a_reader_of_ones_own(tmp_path: Path) -> None:
    """One process, no group; a reader with its own settings; another key."""
    model = Mlp()
    optim = adamw(model)
    train_steps(model, optim, 1)
    planner = FlatOptimSavePlanner(model, {"app.opt": optim})
    state = {"app": {"opt": optim.state_dict(), "net": model.state_dict()}}
    dcp.save(state, storage_writer=StreamingWriter(tmp_path), planner=planner)
    reader = StreamingReader(tmp_path, concurrency=1)
    assert verify_optim_state(model, optim, reader, key="app.opt").ok
    assert verify_model_state(model, reader, key="app.net").ok
    found, *_ = verify_model_state(model, reader, key="elsewhere")
    assert found.what == "not in the checkpoint"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_several_optimizers(tmp_path: Path) -> None:
    """A mapping, as the planners take it; their groups are told apart."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    optims = {"left": adamw(model[0]), "app.right": adamw(model[1])}
    for optim in optims.values():
        model(torch.ones(1, 3)).sum().backward()
        optim.step()
    state = {
        "left": optims["left"].state_dict(),
        "app": {"right": optims["app.right"].state_dict()},
    }
    writer = FileSystemWriter(tmp_path)
    dcp.save(state, storage_writer=writer, planner=FlatOptimSavePlanner(model, optims))
    same = verify_optim_state(model, optims, tmp_path)
    assert same.ok and str(same).startswith("AdamW 'left', AdamW 'app.right': the same")
    for number, optim in enumerate(optims.values()):
        optim.param_groups[0]["lr"] = float(number)
    optims["app.right"].state[model[1].bias]["exp_avg"][1] += 1
    found = verify_optim_state(model, optims, tmp_path)
    assert [(d.fqn, d.state) for d in found] == [
        ("left.param_groups.0", "lr"),
        ("1.bias", "exp_avg"),
        ("app.right.param_groups.0", "lr"),
    ]
    with pytest.raises(ValueError, match="expected an optimizer, found an empty mapping"):
        verify_optim_state(model, {}, tmp_path)
    with pytest.raises(TypeError, match="each optimizer of the mapping"):
        verify_optim_state(model, {"left": model}, tmp_path)  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="expected optim to be"):
        verify_optim_state(model, None, tmp_path)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_result_cannot_be_misread(tmp_path: Path) -> None:
    model = Mlp(depth=5)
    optim = adamw(model)
    train_steps(model, optim, 1)
    save(model, optim, str(tmp_path))
    same = verify_optim_state(model, optim, tmp_path)
    weights = verify_model_state(model, tmp_path)
    train_steps(model, optim, 1)
    other = verify_optim_state(model, optim, tmp_path)
    changed = verify_model_state(model, tmp_path)
    assert same.ok is True and weights.ok is True
    assert other.ok is False and changed.ok is False
    for result in (same, other, weights, changed):
        for misread in (bool, lambda r: not r, lambda r: r and 1, lambda r: 1 if r else 0):
            with pytest.raises(TypeError, match=r"expected \.ok to be asked for"):
                misread(result)
        assert isinstance(result, Verification)
        assert list(result) == list(result.differences) and len(result) == len(list(result))
        assert all(isinstance(difference, Difference) for difference in result)
        assert pickle.loads(pickle.dumps(result)) == result
    assert str(same) == "AdamW 'optim': the same in the checkpoint and live"
    assert str(weights) == "Mlp 'model': the same in the checkpoint and live"
    head, *lines = str(other).splitlines()
    assert head == f"AdamW 'optim': {len(other)} differ:" and len(other) > 11
    assert [line.strip() for line in lines[:10]] == [str(d) for d in other][:10]
    assert lines[10:] == [f"  ... and {len(other) - 10} more"]


# ------------------------------------------------------------------- pure


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_differing_elements(data: st.DataObject) -> None:
    """Any box of any tensor, in any memory order; judged by element numbers of the whole."""
    shape = data.draw(st.lists(st.integers(1, 5), min_size=0, max_size=4))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.bool, torch.cdouble]))
    whole = torch.zeros(shape, dtype=dtype)
    box = whole
    offsets = []
    for d, n in enumerate(shape):
        start = data.draw(st.integers(0, n - 1))
        box = box.narrow(d, start, data.draw(st.integers(1, n - start)))
        offsets.append(start)
    order = data.draw(st.permutations(range(len(shape))))
    other = box.permute(order).clone().permute([order.index(d) for d in range(len(shape))])
    flat = data.draw(st.lists(st.booleans(), min_size=box.numel(), max_size=box.numel()))
    mask = torch.tensor(flat, dtype=torch.bool).view(box.shape)
    other[mask] = 1
    box[mask] = 1  # where the numbers are looked up
    expected = whole.view(-1).nonzero().view(-1).tolist()
    limit = data.draw(st.integers(1, 6))
    left = torch.zeros(box.shape, dtype=dtype)
    ranges = Ranges(limit)
    for start, stop, count in differing(left, other, offsets, shape, limit):
        ranges.add(start, stop, count)
    spans = ranges.spans()
    assert ranges.count == len(expected) and len(spans) <= limit
    assert all(any(a <= n < b for a, b in spans) for n in expected)
    assert all(b < c for (_, b), (c, _) in itertools.pairwise(spans))
    assert all(a in expected and b - 1 in expected for a, b in spans)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 5)), max_size=30), st.integers(1, 5))
def test_ranges(pairs: list[tuple[int, int]], limit: int) -> None:
    ranges = Ranges(limit)
    for start, length in pairs:
        ranges.add(start, start + length)
    spans = ranges.spans()
    covered = {n for a, b in spans for n in range(a, b)}
    wanted = {n for a, n_ in pairs for n in range(a, a + n_)}
    assert len(spans) <= limit and wanted <= covered
    assert all(b < c for (_, b), (c, _) in itertools.pairwise(spans))
    if limit >= len(pairs):
        assert covered == wanted


def test_large_tensors_are_compared_in_blocks() -> None:
    left = torch.zeros(3, 1000, 400)
    right = torch.zeros(400, 1000, 3).permute(2, 1, 0)
    right[1, 999, 399] = 1
    right[2, 0, 0] = 1
    found = list(differing(left, right, (0, 0, 0), left.shape, 4))
    assert [(a, b) for a, b, _ in found] in (
        [(799999, 800001)],
        [(799999, 800000), (800000, 800001)],
    )
