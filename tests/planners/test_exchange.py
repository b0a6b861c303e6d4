"""What several ranks want alike is read once: real ranks, with a store that counts every read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from dcp_fsdp_osd import (
    FlatOptimLoadPlanner,
    FlatOptimSavePlanner,
    StreamingReader,
    StreamingWriter,
)
from tests.models import MODELS, train_steps, wrap_fsdp1
from tests.planners.checks import OPTIMIZERS, assert_same
from tests.ranks import run_ranks


class CountingReader(FileSystemReader):
    """Stock's reader, which notes what it reads: (file, offset) of each item's entry."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.entries: list[tuple[str, int, int]] = []
        self.scalars = 0

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            self.entries.append((info.relative_path, info.offset, info.length))
            small = item.type == LoadItemType.BYTE_IO or item.lengths.numel() == 1
            self.scalars += small
        return super().read_data(plan, planner)

    @property
    def bytes(self) -> int:
        return sum(length for _, _, length in self.entries)


def wrapped(kind: str, world: int, *, steps: int, model: str = "mlp", optim: str = "adamw") -> Any:
    """A model of one of the replicated kinds, and its optimizer."""
    module = MODELS[model]()
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        module = wrap_fsdp1(module, strategy="HYBRID_SHARD", device_mesh=mesh)
    elif kind == "hsdp_flat":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        module = wrap_fsdp1(
            module, strategy="HYBRID_SHARD", device_mesh=mesh, use_orig_params=False
        )
    elif kind == "no_shard":
        module = wrap_fsdp1(module, strategy="NO_SHARD")
    elif kind == "fsdp2":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        for block in module.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(module, mesh=mesh)
    elif kind == "ddp":
        module = DistributedDataParallel(module)
    optimizer = OPTIMIZERS[optim](module.parameters())
    train_steps(module, optimizer, steps)
    return module, optimizer


def _whole(model: Any, optim: Any) -> Any:
    options = StateDictOptions(full_state_dict=True)
    return get_optimizer_state_dict(model, optim, options=options)


READERS: dict[str, Any] = {"stock": CountingReader, "streaming": StreamingReader}
KINDS = ["hsdp", "hsdp_flat", "no_shard", "fsdp2", "ddp"]


def _round_trip(rank: int, world: int, path: str, kind: str, reader: str) -> Any:
    model, optim = wrapped(kind, world, steps=2)
    state = {"optim": optim.state_dict(), "note": {"epoch": 3, "text": "x" * 1000}}
    dcp.save(
        state,
        storage_writer=StreamingWriter(path),
        planner=FlatOptimSavePlanner(model, optim),
    )
    expected = _whole(model, optim)
    model, optim = wrapped(kind, world, steps=0)
    planner = FlatOptimLoadPlanner(model, optim, broadcast=True)
    loaded: dict[str, Any] = {"optim": {}, "note": {"epoch": 0, "text": ""}}
    storage = READERS[reader](path)
    dcp.load(loaded, storage_reader=storage, planner=planner)
    assert loaded["note"] == state["note"]
    optim.load_state_dict(loaded["optim"])
    assert_same(_whole(model, optim), expected)
    train_steps(model, optim, 1)
    sizes = (
        {i: info.length for i, info in storage.storage_data.items()} if reader == "stock" else {}
    )
    entries = storage.entries if reader == "stock" else storage.stats
    return entries, sum(sizes.values()), planner.exchanged


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", KINDS)
def test_replicated_state_is_read_once(tmp_path: Path, kind: str, reader: str) -> None:
    results = run_ranks(_round_trip, 4, str(tmp_path), kind, reader)
    if reader == "stock":
        entries = [entry for found, _, _ in results for entry in found]
        assert len(entries) == len(set(entries))
        assert sum(length for _, _, length in entries) == results[0][1]
    for _, _, exchanged in results:
        assert exchanged.sent + exchanged.received > 0
