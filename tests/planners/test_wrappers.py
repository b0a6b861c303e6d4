"""``torch.compile`` and activation checkpointing, inside and outside of FSDP and DDP."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.models import Mlp, train_steps, wrap_fsdp1
from tests.planners.checks import OPTIMIZERS, assert_same, load, raw, save
from tests.planners.test_interop import compare, full
from tests.ranks import run_ranks


def _compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def _each_block(model: Any, *wraps: Callable[[nn.Module], Any]) -> Any:
    """Wrap every block, the first wrapper innermost."""
    for number, block in enumerate(model.blocks):
        for wrap in wraps:
            block = wrap(block)
        model.blocks[number] = block
    return model


def _fsdp1(module: nn.Module) -> Any:
    return wrap_fsdp1(module, policy=None)


def _in_place(module: nn.Module) -> nn.Module:
    """``module.compile()``, which wraps nothing."""
    module.compile(backend="eager")
    return module


WRAPPINGS: dict[str, Callable[[], Any]] = {
    "FSDP1 of compiled blocks": lambda: _fsdp1(_each_block(Mlp(), _compiled, _fsdp1)),
    "compiled FSDP1": lambda: _compiled(_fsdp1(_each_block(Mlp(), _fsdp1))),
    "FSDP1 of blocks compiled in place": lambda: _fsdp1(_each_block(Mlp(), _in_place, _fsdp1)),
    "FSDP1 of checkpointed blocks": lambda: _fsdp1(_each_block(Mlp(), checkpoint_wrapper, _fsdp1)),
    "checkpointed FSDP1 blocks": lambda: _fsdp1(_each_block(Mlp(), _fsdp1, checkpoint_wrapper)),
    "FSDP1 flat of compiled, checkpointed": lambda: wrap_fsdp1(
        _each_block(Mlp(), checkpoint_wrapper, _compiled), policy="root", use_orig_params=False
    ),
    "FSDP2 of compiled blocks": lambda: fully_shard(_each_block(Mlp(), fully_shard, _compiled)),
    "FSDP2 of checkpointed blocks": lambda: fully_shard(
        _each_block(Mlp(), checkpoint_wrapper, fully_shard)
    ),
    "DDP of a compiled model": lambda: DistributedDataParallel(_compiled(Mlp())),
    "compiled DDP": lambda: _compiled(DistributedDataParallel(Mlp())),
    "DDP of checkpointed blocks": lambda: DistributedDataParallel(
        _each_block(Mlp(), checkpoint_wrapper)
    ),
}


def _save_and_next(rank: int, world: int, path: str, name: str) -> Any:
    """Save, load under the same wrapping, and take the same next step."""
    model, fresh_model = WRAPPINGS[name](), WRAPPINGS[name]()
    train_steps(fresh_model, torch.optim.SGD(fresh_model.parameters(), lr=0.0), 1)
    optim = OPTIMIZERS["adamw"](model.parameters())
    train_steps(model, optim, 2)
    metadata = save(model, optim, path)
    if rank == 0:
        names = {n for n, _ in Mlp().named_parameters()}
        keys = set(metadata.state_dict_metadata)
        assert {k for k in keys if ".state." in k} == {
            f"optim.state.{n}.{part}" for n in names for part in ("exp_avg", "exp_avg_sq", "step")
        }
    fresh = OPTIMIZERS["adamw"](fresh_model.parameters())
    fresh.load_state_dict(load(fresh_model, fresh, path))
    assert_same(fresh.state_dict(), optim.state_dict())
    expected = load(fresh_model, fresh, path, form="full")
    with torch.no_grad():
        for to, by in zip(fresh_model.parameters(), model.parameters(), strict=True):
            to.copy_(by)
    assert train_steps(model, optim, 1, first=2) == train_steps(fresh_model, fresh, 1, first=2)
    for one, two in zip(model.parameters(), fresh_model.parameters(), strict=True):
        assert raw(_local(one)) == raw(_local(two))
    return expected


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _as_plain(rank: int, world: int, paths: list[str], expected: list[Any]) -> None:
    for path, state in zip(paths, expected, strict=True):
        model = wrap_fsdp1(Mlp())
        optim = OPTIMIZERS["adamw"](model.parameters())
        optim.load_state_dict(load(model, optim, path))
        compare(full(model, optim), state)


def test_wrappers(tmp_path: Path) -> None:
    """The names in a checkpoint are those of the bare model, so that any other can load it."""
    paths = [str(tmp_path / name) for name in WRAPPINGS]
    expected = [
        run_ranks(_save_and_next, 2, path, name, timeout=120)[0]
        for path, name in zip(paths, WRAPPINGS, strict=True)
    ]
    run_ranks(_as_plain, 4, paths, expected)


def _from_plain(rank: int, world: int, path: str, expected: Any) -> None:
    for build in WRAPPINGS.values():
        model = build()
        optim = OPTIMIZERS["adamw"](model.parameters())
        optim.load_state_dict(load(model, optim, path))
        found = load(model, optim, path, form="full")
        assert_same(found["state"], expected["state"])
        again = path + "-again"
        save(model, optim, again)
        assert_same(load(model, optim, again, form="full")["state"], expected["state"])


def _plain(rank: int, world: int, path: str) -> Any:
    model = wrap_fsdp1(Mlp(), policy="linears")
    optim = OPTIMIZERS["adamw"](model.parameters())
    train_steps(model, optim, 2)
    save(model, optim, path)
    return full(model, optim)


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
@pytest.mark.slow  # beside all wrappers to and fro
def test_wrappers_load_what_a_bare_model_saved(tmp_path: Path) -> None:
    expected = run_ranks(_plain, 4, str(tmp_path / "plain"))[0]
    run_ranks(_from_plain, 2, str(tmp_path / "plain"), expected, timeout=120)
