"""Checkpoints that one torch saves and another loads.  Run with each interpreter:

    python -m tests.versions.crossing save FOLDER
    python -m tests.versions.crossing load FOLDER

``save`` leaves a checkpoint of every kind of layout saved by stock and by us,
and what is in them as NumPy arrays and JSON, which no torch has a part in.  ``load`` loads each by
stock and by us, on as many ranks and on others, and compares bit for bit.  Prints one line of JSON:
what was done.

Two things stock does not do with itself: options that the older torch's optimizer did not have (of
AdamW, one since 2.7) it passes over only when told to; and what stock of 2.15 saved, stock of
before cannot unpickle (it has a field more), so that this is left to us.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from dcp_fsdp_osd import (
    FlatModelState,
    FlatOptimLoadPlanner,
    FlatOptimSavePlanner,
    FlatOptimState,
    StreamingReader,
    StreamingWriter,
)
from tests.models import train_steps
from tests.planners.test_interop import build
from tests.ranks import close_pool, run_ranks
from tests.torch_gaps import complete_torch

KINDS = ["fsdp1", "fsdp1_flat", "fsdp2"]
SIDES = ["stock", "ours"]  # planner and storage
EXTRA = {"step": 7, "notes": {"names": ["a", "b"], "ratio": 0.25}, "count": torch.arange(5)}


def _arrays(model: nn.Module, optim: torch.optim.Optimizer) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor whole, under its name."""
    options = StateDictOptions(full_state_dict=True)
    for name, value in get_model_state_dict(model, options=options).items():
        yield f"model.{name}", value.numpy()
    for fqn, state in get_optimizer_state_dict(model, optim, options=options)["state"].items():
        for name, value in state.items():
            yield f"optim.{fqn}.{name}", value.numpy()


def _state(model: nn.Module, optim: torch.optim.Optimizer, side: str) -> dict[str, Any]:
    if side == "ours":
        return {"model": FlatModelState(model), "optim": FlatOptimState(model, optim), **EXTRA}
    return {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optim),
        **EXTRA,
    }


def _save(rank: int, world: int, folder: str) -> None:
    for kind in KINDS:
        model, optim = build(kind, world)
        train_steps(model, optim, 2)
        optim.param_groups[0]["lr"] = 0.125
        for side in SIDES:
            path = f"{folder}/{kind}-{side}"
            dcp.save(
                _state(model, optim, side),
                storage_writer=(FileSystemWriter if side == "stock" else StreamingWriter)(path),
                planner=FlatOptimSavePlanner(model, optim) if side == "ours" else None,
            )
        arrays = dict(_arrays(model, optim))
        if rank == 0:
            np.savez(f"{folder}/{kind}.npz", **arrays)


def _load(rank: int, world: int, folder: str) -> int:
    loads = 0
    for saved, side, kind, by in itertools.product(KINDS, SIDES, KINDS, SIDES):
        expected = np.load(f"{folder}/{saved}.npz")
        if side == by == "stock" and not _stock_reads_stock(f"{folder}/{saved}-{side}"):
            continue
        _load_one(world, f"{folder}/{saved}-{side}", expected, kind, by)
        loads += 1
    return loads


def _stock_reads_stock(path: str) -> bool:
    try:
        FileSystemReader(path).read_metadata()
    except ValueError as error:
        assert "too many values to unpack" in str(error), path
        return False
    return True


def _load_one(world: int, path: str, expected: Any, kind: str, by: str) -> None:
    where = f"{path} into {kind} by {by}"
    model, optim = build(kind, world)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(torch.nan)
    state = _state(model, optim, by)
    state |= {
        "step": -1,
        "notes": {"names": ["", ""], "ratio": 0.0},
        "count": torch.zeros(5).long(),
    }
    dcp.load(
        state,
        storage_reader=(FileSystemReader if by == "stock" else StreamingReader)(path),
        planner=FlatOptimLoadPlanner(model, optim)
        if by == "ours"
        else dcp.DefaultLoadPlanner(allow_partial_load=True),
    )
    if by == "stock":
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optim, state["optim"])
    found = dict(_arrays(model, optim))
    assert found.keys() == set(expected.files), where
    for name, value in found.items():
        want = expected[name]
        same = value.dtype == want.dtype and value.shape == want.shape
        assert same and value.tobytes() == want.tobytes(), f"{where}: {name}"
    assert optim.param_groups[0]["lr"] == 0.125, where
    assert torch.equal(state.pop("count"), EXTRA["count"]), where
    assert all(state[key] == EXTRA[key] for key in ("step", "notes")), where


def main(action: str, folder: str) -> None:
    complete_torch()
    try:
        if action == "save":
            Path(folder).mkdir(parents=True)
            run_ranks(_save, 3, folder, timeout=200)
            loads = 0
        else:
            loads = sum(run_ranks(_load, world, folder, timeout=280)[0] for world in (3, 2))
    finally:
        close_pool()
    print(json.dumps({"action": action, "torch": torch.__version__, "loads": loads}))


if __name__ == "__main__":
    main(*sys.argv[1:])
