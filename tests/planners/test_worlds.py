"""Process groups, replicas, wrappers: where FSDP1 meets the rest of torch."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import MixedPrecision
from torch.nn.parallel import DistributedDataParallel

from dcp_fsdp_osd import (
    FlatOptimLoadPlanner,
    FlatOptimSavePlanner,
    StreamingReader,
    StreamingWriter,
)
from dcp_fsdp_osd.fsdp.optim import describe_target
from tests import ranks
from tests.breadth import always
from tests.models import (
    Conv,
    Mlp,
    Transformer,
    full_state,
    train_steps,
    wrap_fsdp1,
    wrap_fsdp1_inside,
)
from tests.planners.checks import assert_same, load, make, save
from tests.ranks import run_ranks
from tests.torch_gaps import async_kinds, async_save, needs_groups_without_rank_0

# ---------------------------------------------------------------- replicas and subgroups


def _hybrid(rank: int, world: int, path: str, strategy: str, use_orig_params: bool) -> Any:
    mesh = ranks.mesh(2, 2, names=("replicate", "shard"))
    wrapping = {"strategy": strategy, "device_mesh": mesh, "use_orig_params": use_orig_params}
    model, optim = make(**wrapping)
    before = optim.state_dict()
    metadata = save(model, optim, path)
    fresh_model, fresh = make(**wrapping, steps=0)
    assert_same(load(fresh_model, fresh, path), before)
    whole = full_state(model, optim)
    if rank:
        return None
    for name, entry in metadata.state_dict_metadata.items():  # each replica wrote its share once
        if name.endswith("exp_avg"):
            elements = sum(chunk.sizes.numel() for chunk in entry.chunks)
            assert elements == entry.size.numel()
    return whole


def _check_full(rank: int, world: int, path: str, expected: Any) -> None:
    model, optim = make(steps=0)
    optim.load_state_dict(load(model, optim, path))
    assert_same(full_state(model, optim)["state"], expected["state"])


@pytest.mark.each_value
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
def test_hybrid(tmp_path: Path, strategy: str, use_orig_params: bool) -> None:
    expected = run_ranks(_hybrid, 4, str(tmp_path), strategy, use_orig_params)[0]
    run_ranks(_check_full, 2, str(tmp_path), expected)


def _subgroup(rank: int, world: int, path: str, members: list[int]) -> None:
    group = dist.new_group(members)
    if rank not in members:
        return
    model, optim = make(process_group=group)
    before = optim.state_dict()
    save(model, optim, path, process_group=group)
    fresh_model, fresh = make(process_group=group, steps=0)
    assert_same(load(fresh_model, fresh, path, process_group=group), before)


@pytest.mark.parametrize(
    "members", [[0, 1], pytest.param([1, 3], marks=needs_groups_without_rank_0)]
)
def test_process_group_that_is_not_the_world(tmp_path: Path, members: list[int]) -> None:
    run_ranks(_subgroup, 4, str(tmp_path), members)
    run_ranks(_load_anywhere, 2, str(tmp_path))


def _load_anywhere(rank: int, world: int, path: str) -> None:
    model, optim = make(steps=0)
    optim.load_state_dict(load(model, optim, path))
    train_steps(model, optim, 1)


def _uneven(rank: int, world: int, path: str, use_orig_params: bool) -> None:
    """One rank more than the tensor has elements, and ranks that hold nothing of a unit."""
    model = wrap_fsdp1(
        nn.Sequential(nn.Linear(1, 1, bias=False)), policy="root", use_orig_params=use_orig_params
    )
    optim = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 1)).sum().backward()
    optim.step()
    before = optim.state_dict()
    assert len(before["state"]) == (rank == 0 or not use_orig_params)  # else it is all padding
    save(model, optim, path)
    assert_same(load(model, torch.optim.AdamW(model.parameters()), path), before)


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_fewer_elements_than_ranks(tmp_path: Path, use_orig_params: bool) -> None:
    run_ranks(_uneven, 4, str(tmp_path), use_orig_params)


# ---------------------------------------------------------------- what FSDP can be told


def _variant(rank: int, world: int, path: str, variant: str) -> None:
    def build(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model: Any = Conv(channels_last=True) if variant == "channels_last" else Mlp()
        if variant == "ignored":
            wrapped: nn.Module = wrap_fsdp1(model, ignored_modules=[model.blocks[0], model.last])
        elif variant == "inside":
            wrapped = wrap_fsdp1_inside(model)
        elif variant == "mixed":
            wrapped = wrap_fsdp1(model, mixed_precision=MixedPrecision(torch.bfloat16))
        elif variant == "mesh":
            wrapped = wrap_fsdp1(model, device_mesh=ranks.mesh(world))
        else:
            wrapped = wrap_fsdp1(model)
        optim = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
        if variant in ("ignored", "inside"):  # outside of FSDP nobody averages gradients
            for step in range(steps):
                wrapped(torch.full((2, 6), 0.1 * (step + 1))).sum().backward()
                optim.step()
                optim.zero_grad()
        else:
            train_steps(wrapped, optim, steps)
        return wrapped, optim

    model, optim = build(2)
    before = optim.state_dict()
    save(model, optim, path)
    if variant == "eval":  # SHARD_GRAD_OP and the root stay unsharded after a forward alone
        with torch.no_grad():
            model(torch.ones(1, 6))
        save(model, optim, path)
    assert_same(load(*build(0), path), before)


VARIANTS = ["ignored", "inside", "mixed", "mesh", "channels_last", "eval"]


@pytest.mark.parametrize("variant", always(["ignored", "inside", "mesh"], VARIANTS))
def test_variants(tmp_path: Path, variant: str) -> None:
    run_ranks(_variant, 3, str(tmp_path), variant)


def _channels_last(rank: int, world: int, path: str, channels_last: bool, expected: Any) -> Any:
    model = wrap_fsdp1(Conv(channels_last=channels_last), policy="root")
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    if expected is None:
        train_steps(model, optim, 2)
        save(model, optim, path)
    else:
        optim.load_state_dict(load(model, optim, path))
    # Stock's flattening is wrong for such tensors, its gather is right.
    whole = full_state(model, optim)["state"]
    if expected is not None:
        assert_same(whole, expected)
    return whole


@pytest.mark.parametrize("channels_last", [True, False])
def test_channels_last_to_and_fro(tmp_path: Path, channels_last: bool) -> None:
    expected = run_ranks(_channels_last, 3, str(tmp_path), channels_last, None)[0]
    run_ranks(_channels_last, 2, str(tmp_path), not channels_last, expected)


# ---------------------------------------------------------------- names


def _wrapped(order: str) -> nn.Module:
    model: nn.Module = Transformer()
    if order == "checkpoint-fsdp":
        model.layers = nn.ModuleList(checkpoint_wrapper(m) for m in model.layers)  # type: ignore
        return wrap_fsdp1(model, policy="root")
    if order == "fsdp-checkpoint":
        model.layers = nn.ModuleList(  # type: ignore[assignment]
            checkpoint_wrapper(wrap_fsdp1(m, policy=None))  # type: ignore[arg-type]
            for m in model.layers  # type: ignore[union-attr]
        )
        return wrap_fsdp1(model, policy=None)
    if order == "compile-fsdp":
        model.layers = nn.ModuleList(torch.compile(m, backend="eager") for m in model.layers)  # type: ignore
        return wrap_fsdp1(model, policy="blocks")
    if order == "fsdp-compile":
        return torch.compile(wrap_fsdp1(model), backend="eager")  # type: ignore[return-value]
    if order == "ddp-compile-checkpoint":
        model.layers = nn.ModuleList(  # type: ignore[assignment]
            torch.compile(checkpoint_wrapper(m), backend="eager")  # type: ignore[misc]
            for m in model.layers  # type: ignore[union-attr]
        )
        return DistributedDataParallel(model)
    return wrap_fsdp1(model)


ORDERS = [
    "checkpoint-fsdp",
    "fsdp-checkpoint",
    "compile-fsdp",
    "fsdp-compile",
    "ddp-compile-checkpoint",
    "plain-fsdp",
]


def _names(rank: int, world: int, order: str) -> None:
    expected = [n for n, _ in Transformer().named_parameters()]
    model = _wrapped(order)
    optim = torch.optim.AdamW(model.parameters())
    layout = describe_target(model, optim).layout
    assert sorted(layout.ids) == sorted(expected)


@pytest.mark.parametrize("order", ORDERS)
def test_wrapper_names_are_left_out(order: str) -> None:
    run_ranks(_names, 2, order)


class _OwnModule(nn.Module):
    """A user's own attribute named ``module`` is part of the name."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


def _own_module(rank: int, world: int) -> None:
    model = DistributedDataParallel(_OwnModule())
    layout = describe_target(model, torch.optim.SGD(model.parameters())).layout
    assert list(layout.ids) == ["module.weight", "module.bias"]


def test_a_module_named_module_keeps_its_name() -> None:
    run_ranks(_own_module, 2)


def _tied(rank: int, world: int, path: str, use_orig_params: bool) -> None:
    model, optim = make("tied", use_orig_params=use_orig_params)
    metadata = save(model, optim, path)
    names = {n.rsplit(".", 1)[0] for n in metadata.state_dict_metadata if ".state." in n}
    assert "optim.state.embed.weight" in names and "optim.state.head.weight" not in names
    layout = describe_target(model, optim).layout
    assert layout.resolve("head.weight") == "embed.weight"
    # A checkpoint that names it by its other name is the same checkpoint.
    if rank == 0:
        _rename(path, "embed.weight", "head.weight")
    dist.barrier()
    before = optim.state_dict()
    fresh_model, fresh = make("tied", use_orig_params=use_orig_params, steps=0)
    assert_same(load(fresh_model, fresh, path), before)


def _rename(path: str, old: str, new: str) -> None:
    """Name a parameter otherwise in ``.metadata``, as a differently wrapped model would."""
    file = Path(path) / ".metadata"
    metadata = pickle.loads(file.read_bytes())

    def renamed(text: str) -> str:
        return text.replace(old, new)

    metadata.state_dict_metadata = {renamed(k): v for k, v in metadata.state_dict_metadata.items()}
    metadata.planner_data = {
        renamed(k): tuple(renamed(p) if isinstance(p, str) else p for p in v)
        for k, v in metadata.planner_data.items()
    }
    metadata.storage_data = {
        dataclasses.replace(k, fqn=renamed(k.fqn)): v for k, v in metadata.storage_data.items()
    }
    file.write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_tied_weights_are_stored_once_and_found_by_both_names(
    tmp_path: Path, use_orig_params: bool
) -> None:
    run_ranks(_tied, 3, str(tmp_path), use_orig_params)


# ---------------------------------------------------------------- more in one state dict


def _mixed(rank: int, world: int, path: str) -> None:
    """One dcp.load: our planner for one optimizer, set_optimizer_state_dict for the other."""

    def build(steps: int) -> Any:
        model, optim = make(steps=steps)
        other, other_optim = make("odd", "momentum", steps=steps)
        return model, optim, other, other_optim

    model, optim, other, other_optim = build(2)
    state = {
        "app": {"optim": optim.state_dict(), "lr": [0.1, 0.2]},
        "other": get_optimizer_state_dict(other, other_optim),
        "step": 100,
        "rng": torch.get_rng_state(),
    }
    keys = {"app.optim": optim}
    dcp.save(
        state,
        storage_writer=FileSystemWriter(path),
        planner=FlatOptimSavePlanner(model, keys),
    )
    fresh_model, fresh, fresh_other, fresh_other_optim = build(0)
    loaded: dict[str, Any] = {
        "app": {"optim": {}, "lr": None},
        "other": get_optimizer_state_dict(fresh_other, fresh_other_optim),
        "step": 0,
        "rng": torch.zeros_like(torch.get_rng_state()),
    }
    dcp.load(
        loaded,
        storage_reader=FileSystemReader(path),
        planner=FlatOptimLoadPlanner(fresh_model, {"app.optim": fresh}),
    )
    fresh.load_state_dict(loaded["app"]["optim"])
    set_optimizer_state_dict(fresh_other, fresh_other_optim, loaded["other"])
    assert_same(fresh.state_dict(), optim.state_dict())
    assert_same(fresh_other_optim.state_dict(), other_optim.state_dict())
    assert (loaded["step"], loaded["app"]["lr"]) == (100, [0.1, 0.2])
    assert torch.equal(loaded["rng"], state["rng"])


def test_ours_and_stock_in_one_load(tmp_path: Path) -> None:
    run_ranks(_mixed, 3, str(tmp_path))


def _fsspec(rank: int, world: int, path: str) -> None:
    model, optim = make()
    dcp.save(
        {"optim": optim.state_dict()},
        storage_writer=FsspecWriter(f"file://{path}"),
        planner=FlatOptimSavePlanner(model, optim),
    )
    fresh_model, fresh = make(steps=0)
    state: dict[str, Any] = {"optim": {}}
    dcp.load(
        state,
        storage_reader=FsspecReader(f"file://{path}"),
        planner=FlatOptimLoadPlanner(fresh_model, fresh),
    )
    assert_same(state["optim"], optim.state_dict())


def test_stock_fsspec_storage(tmp_path: Path) -> None:
    run_ranks(_fsspec, 2, str(tmp_path))


def _streaming(rank: int, world: int, path: str, kind: str) -> None:
    """Our planners with our storage, written by either and read by either."""
    model, optim = make("odd")
    planner = FlatOptimSavePlanner(model, optim)
    writer = StreamingWriter(path) if kind != "read" else FileSystemWriter(path)
    dcp.save({"optim": optim.state_dict()}, storage_writer=writer, planner=planner)
    fresh_model, fresh = make("odd", steps=0, use_orig_params=True)
    state: dict[str, Any] = {"optim": {}}
    reader = StreamingReader(path) if kind != "write" else FileSystemReader(path)
    dcp.load(state, storage_reader=reader, planner=FlatOptimLoadPlanner(fresh_model, fresh))
    assert_same(state["optim"], optim.state_dict())


@pytest.mark.parametrize("kind", ["read", "write", "both"])
def test_streaming_storage(tmp_path: Path, kind: str) -> None:
    run_ranks(_streaming, 3, str(tmp_path), kind)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_one_process_without_a_process_group(tmp_path: Path) -> None:
    """Saved under FSDP1 by three ranks, loaded and saved again by one process, and back."""
    run_ranks(_save_for_one, 3, str(tmp_path / "a"))
    model = Mlp()
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    optim.load_state_dict(load(model, optim, tmp_path / "a"))
    save(model, optim, tmp_path / "b")
    run_ranks(_load_from_one, 3, str(tmp_path / "b"))


def _save_for_one(rank: int, world: int, path: str) -> None:
    save(*make(), path)


def _load_from_one(rank: int, world: int, path: str) -> None:
    expected = make()[1].state_dict()
    assert_same(load(*make(steps=0), path)["state"], expected["state"])


def _user_state_on_one_rank(rank: int, world: int, path: str) -> None:
    model, optim = make()
    if rank == 1:
        optim.state["mine"] = {"count": 3}
    save(model, optim, path)
    assert load(*make(steps=0), path)["state"]["mine"] == {"count": 3}


def test_keys_of_one_rank_are_kept(tmp_path: Path) -> None:
    run_ranks(_user_state_on_one_rank, 3, str(tmp_path))


def test_a_pickled_planner_holds_no_tensor(tmp_path: Path) -> None:
    sizes = run_ranks(_pickled_planner, 2, str(tmp_path))
    assert max(sizes) < 20_000


def _pickled_planner(rank: int, world: int, path: str) -> int:
    model = nn.Sequential(nn.Linear(300, 300))
    wrapped = wrap_fsdp1(model, policy="root")
    optim = torch.optim.AdamW(wrapped.parameters())
    wrapped(torch.ones(1, 300)).sum().backward()
    optim.step()
    planner = FlatOptimSavePlanner(wrapped, optim)
    for name in ("first", "second"):  # the second time from a pickle of one that has been used
        writer = FileSystemWriter(f"{path}/{name}")
        dcp.save({"optim": optim.state_dict()}, storage_writer=writer, planner=planner)
        data = pickle.dumps(planner)
        planner = pickle.loads(data)
    fresh = torch.optim.AdamW(wrapped.parameters())
    assert_same(load(wrapped, fresh, f"{path}/second"), optim.state_dict())
    return len(data)


def _several(rank: int, world: int, path: str) -> None:
    """Two optimizers over one model, by one planner."""

    def build(steps: int) -> tuple[nn.Module, dict[str, torch.optim.Optimizer]]:
        model = wrap_fsdp1(Mlp())
        named = list(model.named_parameters())
        optims: dict[str, torch.optim.Optimizer] = {
            "a": torch.optim.AdamW([p for n, p in named if "blocks" in n]),
            "b": torch.optim.SGD([p for n, p in named if "blocks" not in n], 0.1, momentum=0.9),
        }
        train_steps(model, optims.values(), steps)
        return model, optims

    model, optims = build(2)
    state = {k: o.state_dict() for k, o in optims.items()}
    writer = FileSystemWriter(path)
    dcp.save(state, storage_writer=writer, planner=FlatOptimSavePlanner(model, optims))
    model, fresh = build(0)
    loaded: dict[str, Any] = {"a": {}, "b": {}}
    planner = FlatOptimLoadPlanner(model, fresh)
    dcp.load(loaded, storage_reader=FileSystemReader(path), planner=planner)
    assert_same(loaded, state)


def test_several_optimizers(tmp_path: Path) -> None:
    run_ranks(_several, 3, str(tmp_path))


def _asynchronous(rank: int, world: int, path: str, kind: str) -> None:
    model, optim = make()
    planner = FlatOptimSavePlanner(model, optim)
    future = async_save(
        {"optim": optim.state_dict()},
        kind=kind,
        storage_writer=FileSystemWriter(path),
        planner=planner,
        process_group=dist.new_group(),  # the other one trains meanwhile
    )
    before = {"state": {k: dict(v) for k, v in optim.state_dict()["state"].items()}}
    before["state"] = {k: {n: t.clone() for n, t in v.items()} for k, v in before["state"].items()}
    train_steps(model, optim, 1, first=2)  # must not change what is being saved
    future.result()
    assert_same(load(*make(steps=0), path)["state"], before["state"])


@pytest.mark.slow  # as tests/staging, of a larger world of layouts
@async_kinds
def test_async_save(tmp_path: Path, kind: str) -> None:
    run_ranks(_asynchronous, 2, str(tmp_path), kind)
