"""FlatStager: what it copies, into which memory, and ``dcp.async_save`` with it."""

from __future__ import annotations

import collections
import copy
import gc
import threading
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from dcp_fsdp_osd import (
    FlatModelState,
    FlatOptimLoadPlanner,
    FlatOptimSavePlanner,
    FlatOptimState,
    FlatStager,
    LayoutError,
    StreamingReader,
    StreamingWriter,
)
from tests.models import Mlp, adamw, train_steps, wrap_fsdp1
from tests.planners.checks import assert_same
from tests.ranks import run_ranks
from tests.torch_gaps import HAS_STAGERS, async_save, lacks

pytestmark = pytest.mark.filterwarnings("ignore:torch.quantize", "ignore:TypedStorage")
needs_stagers = lacks(not HAS_STAGERS, "dcp.async_save(async_stager=...)")


def _odd_state() -> dict[str, Any]:
    whole = torch.randn(6, 5)
    param = nn.Parameter(torch.randn(3, 4))
    return {
        "dense": torch.randn(7, 3),
        "param": param,
        "same": param,
        "view": whole[1:3],
        "columns": whole[:, 1:4],
        "strided": torch.randn(4, 6).t(),
        "expanded": torch.randn(5, 1).expand(5, 3),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "bool": torch.tensor([True, False, True]),
        "bf16": torch.randn(33).bfloat16(),
        "complex": torch.randn(3, dtype=torch.complex64).conj(),
        "negated": torch.randn(3, dtype=torch.complex64).imag,
        "computed": (param * 2).sum(),
        "nested": {0: [torch.ones(2), (torch.zeros(3), {"x": None})], (1, "a"): "text"},
        "ordered": collections.OrderedDict(b=torch.ones(1), a=[1, 2]),
        "counter": collections.Counter("abca"),
        "object": types.SimpleNamespace(tensor=torch.arange(4), values=[1]),
        "sparse": torch.eye(3).to_sparse(),
        "quantized": torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8),
    }


def _flat(state: Any) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    if isinstance(state, types.SimpleNamespace):
        return _flat(vars(state))
    if isinstance(state, dict):
        return [tensor for value in state.values() for tensor in _flat(value)]
    return [t for value in state for t in _flat(value)] if isinstance(state, list | tuple) else []


def _equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    same = left.shape == right.shape and left.dtype == right.dtype and left.layout == right.layout
    left, right = left.detach(), right.detach()
    if left.is_quantized:
        left, right = left.dequantize(), right.dequantize()
    return same and torch.equal(left.to_dense(), right.to_dense())


def test_everything_is_copied_and_changes_no_more() -> None:
    stager = FlatStager()
    state = _odd_state()
    expected = [tensor.detach().clone() for tensor in _flat(state)]
    staged = stager.stage(state)
    assert list(staged) == list(state)
    for tensor in _flat(state):
        if not tensor.is_sparse and not tensor.is_quantized and tensor.numel():
            with torch.no_grad():
                (tensor if 0 not in tensor.stride() else tensor[:, :1]).zero_()
    state["nested"][0][1][1]["x"] = 5
    state["object"].values.append(2)
    state["counter"]["z"] = 1
    found = _flat(staged)
    assert len(found) == len(expected)
    assert all(_equal(left, right) for left, right in zip(found, expected, strict=True))
    assert staged["nested"][0][1][1] == {"x": None} and staged["object"].values == [1]
    assert type(staged["ordered"]) is collections.OrderedDict and "z" not in staged["counter"]
    assert staged["strided"].stride() == state["strided"].stride()
    assert staged["param"] is staged["same"] or _equal(staged["param"], staged["same"])


def test_memory_is_one_block_that_is_used_again() -> None:
    stager = FlatStager()
    state = {"a": torch.randn(1000), "b": {"c": torch.randn(7, 9)}, "tied": None}
    state["tied"] = state["a"].view(1000)  # another object, the same memory: copied once
    staged = stager.stage(state)
    first = {t.untyped_storage().data_ptr() for t in _flat(staged)}
    assert len(first) == 1 and staged["a"].data_ptr() == staged["tied"].data_ptr()
    second = stager.stage(state)  # the first is still held
    assert second["a"].untyped_storage().data_ptr() not in first
    state["a"].fill_(1)
    assert not torch.equal(staged["a"], state["a"])
    del staged
    third = stager.stage(state)
    assert {third["a"].untyped_storage().data_ptr()} == first
    assert torch.equal(third["a"], torch.ones(1000))
    del second, third
    held = stager.stage({**state, "more": torch.randn(5000)})  # neither block has room
    assert len(stager._blocks) == 1 and torch.equal(held["a"], torch.ones(1000))
    del held
    for _ in range(3):
        stager.stage(state)
    assert len(stager._blocks) == 1
    stager.close()
    assert not stager._blocks


def test_shared_memory() -> None:
    staged = FlatStager(shared_memory=True).stage({"a": torch.randn(100), "b": torch.ones(3)})
    assert staged["a"].is_shared() and staged["b"].is_shared()


def test_arguments() -> None:
    with pytest.raises(ValueError, match="found both"):
        FlatStager(pin_memory=True, shared_memory=True)
    if not torch.accelerator.is_available():
        with pytest.raises(ValueError, match="expected an accelerator"):
            FlatStager(pin_memory=True)
    assert "0 bytes held" in repr(FlatStager())


def test_what_cannot_be_copied_is_named() -> None:
    with pytest.raises(LayoutError, match=r"loader: .* copy.deepcopy .* cannot pickle '_thread"):
        FlatStager().stage({"a": torch.ones(2), "loader": {"lock": threading.Lock()}})


def test_statefuls_are_asked_and_not_copied() -> None:
    model = nn.Linear(3, 2)
    optim = adamw(model)
    train = {"model": FlatModelState(model), "optim": FlatOptimState(model, optim), "step": 4}
    model(torch.ones(1, 3)).sum().backward()
    optim.step()
    staged = FlatStager().stage(train)
    expected = copy.deepcopy(optim.state_dict()["state"])
    optim.step()
    assert_same(staged["optim"]["state"], expected)
    assert staged["step"] == 4 and isinstance(staged["model"], dict)


def _dtensors(rank: int, world: int) -> None:
    model = fully_shard(Mlp())
    optim = adamw(model)
    train_steps(model, optim, 2)
    state = {"model": model.state_dict(), "optim": optim.state_dict()}
    expected = copy.deepcopy({k: v.to_local() for k, v in state["model"].items()})
    stager = FlatStager()
    staged = stager.stage(state)
    train_steps(model, optim, 1, first=2)
    for key, value in staged["model"].items():
        like = state["model"][key]
        assert isinstance(value, DTensor) and value.placements == like.placements
        assert value.shape == like.shape and value.device_mesh == like.device_mesh
        assert torch.equal(value.to_local(), expected[key])
        assert value.to_local().untyped_storage().data_ptr() == stager._blocks[0].memory.data_ptr()


def test_dtensors() -> None:
    run_ranks(_dtensors, 2)


def _quantized() -> None:
    import torchao.optim

    model = nn.Linear(64, 80)
    optim = torchao.optim.AdamW8bit(model.parameters())
    torch.compiler.set_stance("force_eager")
    model(torch.ones(1, 64)).sum().backward()
    optim.step()
    staged = FlatStager().stage(optim.state_dict())
    like = optim.state_dict()["state"][0]["exp_avg"]
    value = staged["state"][0]["exp_avg"]
    assert type(value) is type(like) and torch.equal(value.codes, like.codes)
    before = value.codes.clone()
    model(torch.randn(1, 64)).sum().backward()
    optim.step()
    assert torch.equal(value.codes, before) and not torch.equal(like.codes, before)


def test_low_bit_state() -> None:
    pytest.importorskip("torchao")
    _quantized()


def _saves(rank: int, world: int, path: str, kind: str, shared: bool, saves: int) -> None:
    """Training changes all state right after each save began; each checkpoint has what was."""
    group = dist.new_group(backend="gloo")
    model = wrap_fsdp1(Mlp(), use_orig_params=bool(saves % 2))
    optim = adamw(model)
    stager = FlatStager(shared_memory=shared)
    planner = FlatOptimSavePlanner()
    expected: list[Any] = []
    future = None
    for number in range(saves):
        train_steps(model, optim, 1, first=number)
        if future is not None:
            future.result()
        expected.append(copy.deepcopy((optim.state_dict(), list(model.parameters()))))
        state = {"model": FlatModelState(model), "optim": FlatOptimState(model, optim)}
        future = async_save(
            {**state, "number": number},
            kind=kind,
            storage_writer=StreamingWriter(f"{path}/{number}", fsync=False),
            planner=planner,
            process_group=group,
            async_stager=stager,
        )
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(1.5)
            for each in optim.state.values():
                each["exp_avg"].mul_(1.25)
    assert future is not None
    future.result()
    gc.collect()
    assert len(stager._blocks) == 1
    stager.close()
    for number, (state_dict, weights) in enumerate(expected):
        again = wrap_fsdp1(Mlp(seed=7), use_orig_params=bool(saves % 2))
        other = adamw(again)
        state = {"model": FlatModelState(again), "optim": FlatOptimState(again, other), "number": 0}
        reader = StreamingReader(f"{path}/{number}")
        dcp.load(state, storage_reader=reader, planner=FlatOptimLoadPlanner())
        assert_same(other.state_dict(), state_dict)
        assert_same([p.detach() for p in again.parameters()], [p.detach() for p in weights])
        assert state["number"] == number


@needs_stagers
@pytest.mark.parametrize(
    ("kind", "shared", "saves"),
    [
        ("thread", False, 4),
        pytest.param("process", False, 3, marks=pytest.mark.slow),
        ("process", True, 2),
    ],
)
def test_async_save(tmp_path: Path, kind: str, shared: bool, saves: int) -> None:
    run_ranks(_saves, 2, str(tmp_path), kind, shared, saves, timeout=120)
