"""What is broadcast, and into what: dtypes, shapes, memory layouts, forms of state, readers."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

from dcp_fsdp_osd import (
    FlatOptimLoadPlanner,
    FlatOptimSavePlanner,
    StreamingReader,
    StreamingWriter,
)
from dcp_fsdp_osd.exchange.regions import narrowed
from tests.breadth import always
from tests.exchange.jobs import CountingReader, large, whole, wrapped
from tests.models import MODELS, two_groups
from tests.planners.checks import OPTIMIZERS, assert_same, load, make, raw, save
from tests.ranks import run_ranks

READERS: dict[str, Any] = {"stock": CountingReader, "streaming": StreamingReader}
DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.bool,
    torch.uint8,
    torch.int64,
    torch.float8_e4m3fn,
]


def odd_values() -> dict[str, Any]:
    """Tensors of an odd number of bytes before ones that need alignment; empty ones; 0-dim ones."""
    values: dict[str, Any] = {"text": "words", "number": 7}
    for k, dtype in enumerate(DTYPES):
        for shape in [(), (0, 3), (7,), (3, 5), (2, 3, 5)]:
            data = torch.arange(max(torch.Size(shape).numel(), 1)) + k
            name = f"{str(dtype)[6:]}_{'x'.join(map(str, shape))}"
            values[name] = data[: torch.Size(shape).numel()].to(dtype).reshape(shape)
    return values


def destinations(values: dict[str, Any], rank: int) -> dict[str, Any]:
    """To be loaded into: as saved, in column order, every second column, and in other dtypes."""
    found: dict[str, Any] = {}
    for k, (name, value) in enumerate(values.items()):
        if not isinstance(value, torch.Tensor):
            found[name] = None
        elif value.dim() < 2:
            found[name] = torch.zeros_like(value)
        elif k % 3 == 0:
            found[name] = torch.zeros(value.shape[::-1], dtype=value.dtype).permute(
                *range(value.dim() - 1, -1, -1)
            )
        elif k % 3 == 1:
            wide = torch.zeros((*value.shape[:-1], 2 * value.shape[-1]), dtype=value.dtype)
            found[name] = wide[..., ::2]
        elif value.dtype in (torch.float32, torch.int64):
            found[name] = torch.zeros(value.shape, dtype=torch.float16 if rank else torch.float64)
        else:
            found[name] = torch.zeros_like(value)
    return found


def _odd(rank: int, world: int, path: str, reader: str) -> Any:
    model, optim = wrapped("ddp", world, steps=1)
    values = odd_values()
    dcp.save(
        {"optim": optim.state_dict(), "rest": values},
        storage_writer=FileSystemWriter(path),
        planner=FlatOptimSavePlanner(model, optim),
    )
    results = []
    for broadcast in (False, True):
        state: dict[str, Any] = {"optim": {}, "rest": destinations(values, rank)}
        storage = READERS[reader](path)
        planner = FlatOptimLoadPlanner(model, optim, broadcast=broadcast)
        dcp.load(state, storage_reader=storage, planner=planner)
        results.append(state)
        for value in state["rest"].values():  # beside every second column there is nothing new
            if isinstance(value, torch.Tensor) and value._base is not None:
                results[-1].setdefault("around", []).append(raw(value._base))
    assert_same(results[1], results[0])
    stock = {"rest": destinations(values, rank)}
    dcp.load(stock, storage_reader=FileSystemReader(path))
    assert_same(results[1]["rest"], stock["rest"])
    assert results[1]["rest"]["text"] == "words"
    assert planner.exchanged is not None


@pytest.mark.parametrize("reader", always(["stock"], READERS))
def test_dtypes_shapes_and_layouts(tmp_path: Path, reader: str) -> None:
    run_ranks(_odd, 3, str(tmp_path), reader)


def _forms(rank: int, world: int, path: str, reader: str) -> Any:
    model, optim = make(strategy="FULL_SHARD", steps=2)
    save(model, optim, path)
    expected = whole(model, optim)
    counts: dict[str, Any] = {}
    for name, options in {
        "full": {"form": "full"},
        "rank0": {"form": "full", "rank0_only": True},
        "sharded": {"form": "sharded"},
    }.items():
        state: dict[str, Any] = {"optim": {}}
        storage = READERS[reader](path)
        planner = FlatOptimLoadPlanner(model, optim, broadcast=True, **options)
        dcp.load(state, storage_reader=storage, planner=planner)
        alone = load(model, optim, path, broadcast=False, **options)
        fresh, fresh_optim = make(strategy="FULL_SHARD", steps=0)
        if name == "sharded":
            set_optimizer_state_dict(fresh, fresh_optim, state["optim"])
        else:
            assert_same(state["optim"], alone)
            assert bool(state["optim"]) == (name == "full" or rank == 0)
            only = name == "rank0"
            stock = StateDictOptions(
                full_state_dict=True, broadcast_from_rank0=only, cpu_offload=only
            )
            set_optimizer_state_dict(fresh, fresh_optim, state["optim"], options=stock)
        assert_same(whole(fresh, fresh_optim), expected)
        counts[name] = storage.entries if reader == "stock" else storage.stats.bytes
    return counts


@pytest.mark.parametrize("reader", always(["streaming"], READERS))
def test_full_and_sharded_form(tmp_path: Path, reader: str) -> None:
    results = run_ranks(_forms, 4, str(tmp_path), reader)
    for form in ("full", "rank0"):
        if reader == "stock":
            entries = [entry for counts in results for entry in counts[form]]
            assert len(entries) == len(set(entries))


def _rank0_large(rank: int, world: int, path: str) -> Any:
    model, optim = wrapped("ddp", world, steps=1, model=large)
    dcp.save(
        {"optim": optim.state_dict()},
        storage_writer=StreamingWriter(path),
        planner=FlatOptimSavePlanner(model, optim),
    )
    expected = whole(model, optim)
    storage = StreamingReader(path)
    planner = FlatOptimLoadPlanner(model, optim, form="full", rank0_only=True, broadcast=True)
    state: dict[str, Any] = {"optim": {}}
    dcp.load(state, storage_reader=storage, planner=planner)
    if rank == 0:
        assert_same(state["optim"]["state"], expected["state"])
    else:
        assert state["optim"] == {}
    return storage.stats.bytes


def test_helpers_read_for_rank_0(tmp_path: Path) -> None:
    """Each rank reads a part of what rank 0 alone wants."""
    read = run_ranks(_rank0_large, 3, str(tmp_path), timeout=120)
    assert min(read) > 0.25 * sum(read)


class Reordering(FileSystemReader):
    """Sorts the plan's items in place, as s3torchconnector's reader does."""

    def prepare_local_plan(self, plan: Any) -> Any:
        plan.items.sort(
            key=lambda i: (
                self.storage_data[i.storage_index].relative_path,
                -self.storage_data[i.storage_index].offset,
            )
        )
        return plan


class OwnFsspec(FsspecReader):
    """Stock's over fsspec, on a local path."""


def _third_party(rank: int, world: int, path: str, kind: str) -> None:
    model, optim = wrapped("hsdp", world, steps=2)
    save(model, optim, path)
    expected = whole(model, optim)
    reader: Any = {"reordering": Reordering, "fsspec": OwnFsspec, "stock": FileSystemReader}[kind]
    model, optim = wrapped("hsdp", world, steps=0)
    planner = FlatOptimLoadPlanner(model, optim, broadcast=True)
    state: dict[str, Any] = {"optim": {}}
    url = f"file://{path}" if kind == "fsspec" else path
    dcp.load(state, storage_reader=reader(url), planner=planner)
    assert planner.exchanged is not None
    optim.load_state_dict(state["optim"])
    assert_same(whole(model, optim), expected)


@pytest.mark.parametrize("kind", ["stock", "reordering", "fsspec"])
def test_third_party_readers(tmp_path: Path, kind: str) -> None:
    run_ranks(_third_party, 4, str(tmp_path), kind)


class Splitting(FileSystemReader):
    """Reads the first row of every matrix by itself."""

    def prepare_local_plan(self, plan: Any) -> Any:
        items = []
        for item in plan.items:
            rows = list(item.lengths)
            if len(rows) != 2 or rows[0] < 2:
                items.append(item)
            else:
                items.append(narrowed(item, (0, 0), (1, rows[1])))
                items.append(narrowed(item, (1, 0), (rows[0] - 1, rows[1])))
        return dataclasses.replace(plan, items=items)


def _splitting(rank: int, world: int, path: str) -> None:
    model, optim = make(steps=2, strategy="NO_SHARD")
    save(model, optim, path)
    for broadcast in ("auto", True):
        planner = FlatOptimLoadPlanner(model, optim, broadcast=broadcast)
        state: dict[str, Any] = {"optim": {}}
        if broadcast is True:
            with pytest.raises(CheckpointException, match="changed the items of the plan"):
                dcp.load(state, storage_reader=Splitting(path), planner=planner)
        else:
            dcp.load(state, storage_reader=Splitting(path), planner=planner)
            assert_same(state["optim"], optim.state_dict())


def test_a_reader_that_changes_the_plan(tmp_path: Path) -> None:
    run_ranks(_splitting, 2, str(tmp_path))


def _corners(rank: int, world: int, path: str, case: str) -> None:
    strategy = {"strategy": "NO_SHARD"}
    if case == "tied":
        model, optim = make("tied", steps=2, policy="root", **strategy)
    elif case == "groups":
        model, _ = make(steps=0, **strategy)
        optim = torch.optim.AdamW(two_groups(model))
        from tests.models import train_steps

        train_steps(model, optim, 2)
    else:
        model, optim = make(steps=2, **strategy)
    other = OPTIMIZERS["sgd" if case != "several" else "momentum"](model.parameters())
    optims: Any = {"a.optim": optim, "b": other} if case == "several" else {"optim": optim}
    state: dict[str, Any] = {}
    for key, each in optims.items():
        here = state
        *outer, last = key.split(".")
        for step in outer:
            here = here.setdefault(step, {})
        here[last] = each.state_dict()
    dcp.save(
        state,
        storage_writer=FileSystemWriter(path),
        planner=FlatOptimSavePlanner(model, optims),
    )
    results = []
    for broadcast in (False, True):
        empty: dict[str, Any] = (
            {"a": {"optim": {}}, "b": {}} if case == "several" else {"optim": {}}
        )
        planner = FlatOptimLoadPlanner(model, optims, broadcast=broadcast)
        dcp.load(empty, storage_reader=FileSystemReader(path), planner=planner)
        results.append(empty)
    assert_same(results[1], results[0])
    assert planner.exchanged is not None


@pytest.mark.parametrize("case", ["tied", "groups", "several"])
def test_tied_weights_groups_and_several_optimizers(tmp_path: Path, case: str) -> None:
    run_ranks(_corners, 2, str(tmp_path), case)


def _partial(rank: int, world: int, path: str) -> None:
    """``strict=False``: what does not match is skipped on all ranks, and kept to the bit."""
    model, optim = make(steps=2, strategy="NO_SHARD")
    save(model, optim, path)
    from torch import nn

    from tests.models import train_steps, wrap_fsdp1

    class Wider(type(MODELS["mlp"]())):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> Any:
            return self.out(super().forward(x))

    model = wrap_fsdp1(Wider(), strategy="NO_SHARD")
    optim = OPTIMIZERS["adamw"](model.parameters())
    train_steps(model, optim, 1)
    results = []
    for broadcast in (False, True):
        state = {"optim": copy.deepcopy(optim.state_dict())}
        planner = FlatOptimLoadPlanner(model, optim, broadcast=broadcast, strict=False)
        dcp.load(state, storage_reader=FileSystemReader(path), planner=planner)
        assert planner.skipped
        results.append(state)
    assert_same(results[1], results[0])


@pytest.mark.filterwarnings("ignore:skipped")
def test_what_does_not_match_is_skipped(tmp_path: Path) -> None:
    run_ranks(_partial, 2, str(tmp_path))
