"""``form="sharded"`` and ``"full"``: what stock's ``set_optimizer_state_dict`` takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests.breadth import always
from tests.models import Mlp, train_steps, wrap_fsdp1
from tests.planners.checks import OPTIMIZERS, assert_same, load, make, save
from tests.planners.test_interop import KINDS, build, compare, full
from tests.ranks import RankError, run_ranks
from tests.torch_gaps import needs_groups_without_rank_0


def _save(rank: int, world: int, path: str) -> Any:
    model, optim = build("fsdp1", world)
    train_steps(model, optim, 2)
    save(model, optim, path)
    return full(model, optim)


def _sharded(rank: int, world: int, path: str, kind: str, expected: Any) -> None:
    model, optim = build(kind, world)
    loaded = load(model, optim, path, form="sharded")
    value: Any = loaded["state"]["blocks.0.up.weight"]["exp_avg"]
    wanted: Any = {"fsdp1": ShardedTensor, "fsdp1_flat": ShardedTensor}.get(kind, DTensor)
    if kind in ("ddp", "plain"):
        wanted = torch.Tensor
    assert isinstance(value, wanted)
    set_optimizer_state_dict(model, optim, loaded)
    compare(full(model, optim), expected)


@pytest.mark.parametrize("kind", always(["fsdp1", "fsdp1_flat", "fsdp2"], KINDS))
def test_sharded(tmp_path: Path, kind: str) -> None:
    expected = run_ranks(_save, 4, str(tmp_path))[0]
    run_ranks(_sharded, 1 if kind == "plain" else 3, str(tmp_path), kind, expected)


def _full(rank: int, world: int, path: str, kind: str, options: Any, expected: Any) -> None:
    model, optim = build(kind, world)
    rank0_only = options.get("broadcast_from_rank0", False)
    loaded = load(model, optim, path, form="full", rank0_only=rank0_only)
    if rank0_only and rank:
        assert loaded == {}
    else:
        assert_same(loaded["state"], expected["state"])
    set_optimizer_state_dict(
        model, optim, loaded, options=StateDictOptions(full_state_dict=True, **options)
    )
    compare(full(model, optim), expected)


@pytest.mark.each_value
@pytest.mark.parametrize("options", [{}, {"broadcast_from_rank0": True}, {"cpu_offload": True}])
@pytest.mark.parametrize("kind", ["fsdp1", "fsdp1_flat", "fsdp2", "ddp"])
def test_full(tmp_path: Path, kind: str, options: dict[str, bool]) -> None:
    expected = run_ranks(_save, 4, str(tmp_path))[0]
    run_ranks(_full, 3, str(tmp_path), kind, options, expected)


def _hybrid_sharded(rank: int, world: int, path: str, expected: Any) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = wrap_fsdp1(Mlp(), strategy="HYBRID_SHARD", device_mesh=mesh)
    optim = OPTIMIZERS["adamw"](model.parameters())
    loaded = load(model, optim, path, form="sharded")
    for name, value in loaded["state"].items():
        found = value["exp_avg"].full_tensor()
        assert_same(found, expected["state"][name]["exp_avg"])


def test_sharded_over_a_hybrid_mesh(tmp_path: Path) -> None:
    expected = run_ranks(_save, 4, str(tmp_path))[0]
    run_ranks(_hybrid_sharded, 4, str(tmp_path), expected)


def _fails(rank: int, world: int, path: str, form: str) -> None:
    model, optim = make("odd", steps=0)
    into: dict[str, Any] = {}
    try:
        load(model, optim, path, into=into, form=form)
    finally:
        assert into == {}


@pytest.mark.parametrize("form", ["sharded", "full"])
def test_a_failed_load_leaves_the_dict_empty(tmp_path: Path, form: str) -> None:
    run_ranks(_save, 2, str(tmp_path))
    with pytest.raises(RankError) as caught:
        run_ranks(_fails, 2, str(tmp_path), form)
    assert caught.value.all_raised("CheckpointMismatchError")
    assert not any("AssertionError" in f.types for f in caught.value.failures.values())
    for line in ("cube: not in the checkpoint", "last.bias: in the checkpoint, but"):
        assert line in str(caught.value)


def _no_collectives(rank: int, world: int, path: str) -> None:
    """A sharded load of ranks 2 and 3 alone, while the others are elsewhere."""
    group = dist.new_group([2, 3])
    if rank < 2:
        return
    model, optim = make(process_group=group, steps=0)
    loaded = load(model, optim, path, form="sharded", process_group=group)
    value = loaded["state"]["first.weight"]["exp_avg"]
    assert tuple(value.size()) == (6, 6)


@needs_groups_without_rank_0
def test_sharded_over_a_subgroup(tmp_path: Path) -> None:
    run_ranks(_save, 2, str(tmp_path))
    run_ranks(_no_collectives, 4, str(tmp_path))
