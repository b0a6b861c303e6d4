"""torchao's low-bit AdamW: state that is quantized in blocks, saved and loaded to the bit."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException, FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.two_tensor import TwoTensor

from dcp_fsdp_osd import (
    FlatOptimLoadPlanner,
    FlatOptimSavePlanner,
    FlatOptimState,
    StreamingReader,
    StreamingWriter,
    verify_optim_state,
)
from tests import ranks
from tests.models import wrap_fsdp1
from tests.planners.checks import assert_same, load, save
from tests.ranks import run_ranks
from tests.torch_gaps import train_fsdp2_on_cpu

needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed"
)


class Model(nn.Module):
    """``even`` (128 x 128): whole blocks for up to 4 ranks. ``bias``: never quantized."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in ({"even": (128, 128), "bias": (128,)} | shapes).items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(())
        for number, param in enumerate(self.parameters()):
            whole = param.full_tensor() if isinstance(param, DTensor) else param
            total = total + ((whole * x[number]).sin() * whole).sum()
        return total


def make(
    kind: str,
    name: str = "AdamW8bit",
    *,
    shapes: Any = None,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    import torchao.optim

    torch.compiler.set_stance("force_eager")
    model: nn.Module = Model(**shapes or {}).to(dtype)
    if kind == "fsdp2":
        fully_shard(model)
    elif kind == "hsdp":
        size = dist.get_world_size()
        names = ("replicas", "shards")
        fully_shard(model, mesh=ranks.mesh(2, size // 2, names=names))
    elif kind == "columns":
        fully_shard(model, shard_placement_fn=lambda p: Shard(p.dim() - 1))
    elif kind == "tp":
        mesh = ranks.mesh(dist.get_world_size())
        for key, param in list(model.named_parameters()):
            columns = distribute_tensor(param.detach(), mesh, [Shard(param.dim() - 1)])
            setattr(model, key, nn.Parameter(columns))
    elif kind == "ddp":
        model = DistributedDataParallel(model)
    elif kind == "fsdp1":
        model = wrap_fsdp1(model)
    optim = torch.optim.AdamW if name == "AdamW" else getattr(torchao.optim, name)
    return model, optim(model.parameters(), lr=0.01, **options)


def train(model: nn.Module, optim: torch.optim.Optimizer, *steps: int) -> None:
    train_fsdp2_on_cpu(model)
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        model(torch.randn(8, generator=generator)).backward()
        optim.step()
        optim.zero_grad()


def apart(value: Any) -> Any:
    """Quantized values as mappings of their tensors, which ``assert_same`` compares."""
    if isinstance(value, dict):
        return {key: apart(item) for key, item in value.items()}
    if isinstance(value, list):
        return [apart(item) for item in value]
    with torch.no_grad():
        local = value.to_local() if isinstance(value, DTensor) else value
    if not hasattr(local, "__tensor_flatten__"):
        return local.clone() if isinstance(local, torch.Tensor) else local
    names, attributes = local.__tensor_flatten__()
    inner = {name: getattr(local, name).clone() for name in names}
    dtype = value.dtype, inner["codes"].dtype
    inner["codes"] = inner["codes"].view(torch.uint8)  # fp8 has no pickle between ranks
    return {**inner, "type": type(local).__name__, "attributes": attributes, "dtype": dtype}


def state_of(optim: torch.optim.Optimizer) -> Any:
    return apart(optim.state_dict())


def weights(model: nn.Module) -> Any:
    return [apart(param.detach()) for param in model.parameters()]


def _same_layout(rank: int, world: int, path: str, kind: str, name: str, options: Any) -> None:
    model, optim = make(kind, name, **options)
    train(model, optim, 0, 1)
    save(model, optim, path)
    before, at = state_of(optim), weights(model)
    assert any(isinstance(v, dict) for v in before["state"][0].values())
    assert verify_optim_state(model, optim, path).ok
    train(model, optim, 2, 3)
    after, end = state_of(optim), weights(model)
    found = {d.state for d in verify_optim_state(model, optim, path) if d.fqn == "even"}
    assert found >= {"exp_avg.codes", "exp_avg.scale", "exp_avg_sq.codes"}

    # into an empty dict, before the first step
    fresh_model, fresh = make(kind, name, **options)
    fresh.load_state_dict(load(fresh_model, fresh, path))
    assert_same(state_of(fresh), before)
    _go_on(fresh_model, fresh, at)
    assert_same(state_of(fresh), after)
    assert_same(weights(fresh_model), end)

    # in place
    memory = [p.data_ptr() for p in _inner(fresh)]
    state = {"optim": FlatOptimState(fresh_model, fresh)}
    planner = FlatOptimLoadPlanner(fresh_model, fresh)
    dcp.load(state, storage_reader=FileSystemReader(path), planner=planner)
    assert [p.data_ptr() for p in _inner(fresh)] == memory
    assert_same(state_of(fresh), before)
    _go_on(fresh_model, fresh, at)
    assert_same(state_of(fresh), after)
    assert_same(weights(fresh_model), end)


def _inner(optim: torch.optim.Optimizer) -> list[torch.Tensor]:
    found = []
    for state in optim.state.values():
        for value in state.values():
            with torch.no_grad():
                local = value.to_local() if isinstance(value, DTensor) else value
            if hasattr(local, "codes"):
                found += [local.codes, local.scale]
    return found


def _go_on(model: nn.Module, optim: torch.optim.Optimizer, at: Any) -> None:
    with torch.no_grad():
        for param, saved in zip(model.parameters(), at, strict=True):
            (param.to_local() if isinstance(param, DTensor) else param).copy_(saved)
    train(model, optim, 2, 3)


@needs_torchao
@pytest.mark.parametrize(
    ("kind", "name", "world", "options"),
    [
        ("fsdp2", "AdamW8bit", 2, {"block_size": 64}),
        ("fsdp2", "AdamWFp8", 2, {}),
        ("hsdp", "AdamW8bit", 4, {}),
        ("ddp", "AdamW4bit", 2, {"dtype": torch.bfloat16}),
        pytest.param("fsdp2", "AdamW8bit", 2, {}, marks=pytest.mark.slow),
        pytest.param("fsdp2", "AdamW4bit", 2, {}, marks=pytest.mark.slow),
        pytest.param("columns", "AdamW8bit", 2, {}, marks=pytest.mark.slow),
        pytest.param("tp", "AdamW8bit", 4, {"shapes": {"thin": (4096, 3)}}, marks=pytest.mark.slow),
    ],
)
def test_same_layout(tmp_path: Path, kind: str, name: str, world: int, options: Any) -> None:
    """``thin``: of its columns the last rank has none."""
    run_ranks(_same_layout, world, str(tmp_path), kind, name, options, timeout=120)


# ---------------------------------------------------------------- other layouts

FEW = {"few": (3, 4096), "small": (64, 128)}
"""``few``: of 4 ranks the last has no row. ``small``: 4096 elements on each of 2 ranks, 2048 on
each of 4, which a fresh optimizer would not quantize."""
ODD = {"odd": (136, 64)}
"""17 blocks for each of 2 ranks, 8.5 for each of 4."""
TAIL = {"tail": (126, 128)}
"""Of 4 ranks, 3 have 16 blocks, and the last has 3840 elements, too few to be quantized."""


def _whole(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().full_tensor() for p in model.parameters()]


def _set_weights(model: nn.Module, whole: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for param, value in zip(model.parameters(), whole, strict=True):
            cut = distribute_tensor(value, param.device_mesh, param.placements)
            param.to_local().copy_(cut.to_local())


def _saved(
    rank: int, world: int, path: str, shapes: Any, start: Any = None
) -> tuple[Any, list[torch.Tensor], Any, list[torch.Tensor]]:
    """State and weights after two steps, when it is saved (or loaded), and after two more."""
    model, optim = make("fsdp2", shapes=shapes)
    if start is None:
        train(model, optim, 0, 1)
        save(model, optim, path)
    else:
        optim.load_state_dict(load(model, optim, path))
        _set_weights(model, start)
    before, at = state_of(optim), _whole(model)
    assert verify_optim_state(model, optim, path).ok
    train(model, optim, 2, 3)
    return before["state"], at, state_of(optim)["state"], _whole(model)


def joined(states: list[Any]) -> Any:
    """One rank's state from that of all: each of the 1-D tensors, in the order of the ranks."""
    found: Any = {}
    for state in states:
        for number, values in state.items():
            for name, value in values.items():
                parts = found.setdefault(number, {}).setdefault(name, {})
                inner = value if isinstance(value, dict) else {"plain": value}
                for part, tensor in inner.items():
                    parts.setdefault(part, []).append(tensor)
    for values in found.values():
        for parts in values.values():
            for part, pieces in parts.items():
                if part in ("codes", "scale", "plain") and pieces[0].dim():
                    parts[part] = torch.cat([piece.reshape(-1) for piece in pieces])
                else:
                    for piece in pieces[1:]:
                        assert_same(piece, pieces[0])
                    parts[part] = pieces[0]
            if "codes" in parts and not parts.get("plain", torch.zeros(1)).numel():
                del parts["plain"]
    return found


@needs_torchao
@pytest.mark.parametrize(("world", "other"), [(2, 4), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_other_world_size(tmp_path: Path, world: int, other: int) -> None:
    """To the bit, the next steps too: blocks are the same ones whoever holds them, and means of
    equal gradients over 2 and 4 ranks are exact."""
    shapes = FEW if world == 2 else {"few": FEW["few"]}
    expected = run_ranks(_saved, world, str(tmp_path), shapes)
    start = expected[0][1]
    found = run_ranks(_saved, other, str(tmp_path), shapes, start)
    for at in (0, 2):
        left, right = (joined([rank[at] for rank in ranks]) for ranks in (expected, found))
        assert "codes" in left[0]["exp_avg"] and "codes" in left[2]["exp_avg_sq"]
        assert_same(right, left)
    assert_same(found[0][3], expected[0][3])


@needs_torchao
def test_parts_that_are_not_quantized(tmp_path: Path) -> None:
    """The last rank keeps plain state of ``tail``, and empty state of ``few``."""
    options = {"shapes": TAIL | {"few": (3, 4096)}}
    run_ranks(_same_layout, 4, str(tmp_path), "fsdp2", "AdamW8bit", options)
    metadata = FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    sizes = {
        key.rpartition("tail.exp_avg.")[2]: tuple(value.size)
        for key, value in metadata.items()
        if "tail.exp_avg." in key
    }
    assert sizes == {"codes": (3 * 4096,), "scale": (48,), "qmap": (256,), "plain": (3840,)}
    assert "optim.state.few.exp_avg.codes" in metadata
    assert "optim.state.few.exp_avg.plain" not in metadata


def _refused(expected: str, call: Any, *args: Any, **options: Any) -> None:
    with pytest.raises(CheckpointException, match=expected):
        call(*args, **options)


def _save_two(rank: int, world: int, path: str) -> None:
    shapes = FEW | ODD
    model, optim = make("fsdp2", shapes=shapes)
    train(model, optim, 0)
    save(model, optim, path)
    for form in ("full", "sharded"):
        _refused("form='flat'", load, model, optim, path, form=form)
    plain = "even.exp_avg: OptimState8bit in blocks of 256 in the checkpoint, but AdamW makes noth"
    for name, options, expected in (
        ("AdamW", {}, plain),
        ("AdamWFp8", {}, "but AdamWFp8 makes OptimStateFp8 in blocks of 256"),
        ("AdamW8bit", {"block_size": 128}, "makes OptimState8bit in blocks of 128"),
    ):
        fresh_model, fresh = make("fsdp2", name, shapes=shapes, **options)
        _refused(expected, load, fresh_model, fresh, path)
    train(fresh_model, fresh, 0)
    live = state_of(fresh)
    _refused(
        "OptimState8bit in blocks of 128 in the optimizer",
        load,
        fresh_model,
        fresh,
        path,
        into=fresh.state_dict(),
    )
    assert any(
        d.fqn == "even" and "in blocks of 128" in d.what
        for d in verify_optim_state(fresh_model, fresh, path)
    )
    kept = load(fresh_model, fresh, path, into=fresh.state_dict(), strict=False)
    assert_same(apart(kept["state"][0]), live["state"][0])  # even
    flat_model, flat = make("fsdp1", "AdamW", shapes=shapes)
    _refused("even.exp_avg: .*FSDP1's flat pieces cannot take", load, flat_model, flat, path)


def _load_four(rank: int, world: int, path: str, two: str) -> None:
    model, optim = make("fsdp2", shapes=FEW | ODD)
    expected = r"odd.exp_avg: .*of which this rank's elements \[0:2176\] are not whole ones"
    _refused(expected, load, model, optim, two)
    loaded = load(model, optim, two, strict=False)
    assert sorted(loaded["state"]) == [0, 1, 2, 3]
    train(model, optim, 5)
    live = state_of(optim)
    in_place = "small.exp_avg: OptimState8bit in blocks of 256 in the checkpoint, plain torch.float"
    _refused(in_place, load, model, optim, two, into=optim.state_dict())
    kept = apart(load(model, optim, two, into=optim.state_dict(), strict=False))
    for number in (3, 4):  # small and odd
        assert_same(kept["state"][number], live["state"][number])
    assert_same(kept["state"][0], apart(loaded["state"][0]))

    model, optim = make("fsdp2", shapes=TAIL | {"small": (64, 128)})
    train(model, optim, 0)
    save(model, optim, path)


def _load_two(rank: int, world: int, path: str) -> None:
    model, optim = make("fsdp2", shapes=TAIL | {"small": (64, 128)})
    expected = r"tail.exp_avg: .*those from 12288 on were not quantized"
    _refused(expected, load, model, optim, path)
    train(model, optim, 0)
    expected = "small.exp_avg: plain in the checkpoint, OptimState8bit in blocks of 256 in the opt"
    _refused(expected, load, model, optim, path, into=optim.state_dict())


@needs_torchao
def test_refused(tmp_path: Path) -> None:
    """On every rank, with the state, what was found and what to do."""
    run_ranks(_save_two, 2, str(tmp_path / "2"))
    run_ranks(_load_four, 4, str(tmp_path / "4"), str(tmp_path / "2"))
    run_ranks(_load_two, 2, str(tmp_path / "4"))


def _sharded_otherwise(rank: int, world: int, path: str) -> None:
    """Parts that are no intervals, and FSDP1's, which are none of whole blocks."""
    shapes = {"few": (3, 4096)}
    model, optim = make("columns", shapes=shapes)
    train(model, optim, 0)
    save(model, optim, path)
    row_model, rows = make("fsdp2", shapes=shapes)
    expected = r"even: state exp_avg.codes, .* saved per rank and cannot be resharded: saved for"
    _refused(expected, load, row_model, rows, path)
    train(row_model, rows, 0)
    save(row_model, rows, f"{path}/rows")
    expected = r"even.exp_avg: OptimState8bit .* this rank's part \(even at .* is no interval"
    _refused(expected, load, model, optim, f"{path}/rows")
    flat_model, flat = make("fsdp1", shapes=shapes)
    train(flat_model, flat, 0)
    expected = r"exp_avg: expected a plain tensor.*found a OptimState8bit .* of kind 'flat'"
    _refused(expected, save, flat_model, flat, f"{path}/flat")


@needs_torchao
def test_other_shardings_are_refused(tmp_path: Path) -> None:
    run_ranks(_sharded_otherwise, 2, str(tmp_path))


# ---------------------------------------------------------------- wrappers, writers


def _wrapped(rank: int, world: int, path: str, name: str) -> Any:
    """Saved under DDP by our writer; loaded under each wrapping by our reader."""
    model, optim = make("ddp", name)
    train(model, optim, 0, 1)
    writer = StreamingWriter(path, fsync=False)
    state: dict[str, Any] = {"optim": FlatOptimState(model, optim)}
    dcp.save(state, storage_writer=writer, planner=FlatOptimSavePlanner(model, optim))
    found = []
    for kind in ("ddp", "fsdp2", "plain"):
        fresh_model, fresh = make(kind, name)
        state = {"optim": {}}
        planner = FlatOptimLoadPlanner(fresh_model, fresh)
        dcp.load(state, storage_reader=StreamingReader(path), planner=planner)
        fresh.load_state_dict(state["optim"])
        found.append(state_of(fresh)["state"])
    return state_of(optim)["state"], *found


@needs_torchao
@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_wrappers(tmp_path: Path, name: str) -> None:
    ranks = run_ranks(_wrapped, 2, str(tmp_path), name)
    expected, ddp, _, plain = ranks[0]
    assert_same(ddp, expected)
    assert_same(plain, expected)
    rows = joined([rank[2] for rank in ranks])
    for number, values in rows.items():
        for state, parts in values.items():
            whole = expected[number][state]
            for part in ("codes", "scale", "qmap"):
                if part in parts:
                    assert_same(parts[part], whole[part].reshape(-1))
            if "codes" not in parts:
                assert_same(parts["plain"], whole)


# ---------------------------------------------------------------- stock, other subclasses


def _stock(rank: int, world: int, path: str) -> None:
    """Stock's planner pickles the subclasses, and stock's reader gives back plain tensors."""
    model, optim = make("fsdp2")
    train(model, optim, 0, 1)
    dcp.save({"optim": get_optimizer_state_dict(model, optim)}, checkpoint_id=path)
    expected = "even.exp_avg: saved with another planner in fewer bytes than it has elements"
    for name in ("AdamW8bit", "AdamW"):
        fresh_model, fresh = make("fsdp2", name)
        _refused(expected, load, fresh_model, fresh, path)
    _refused(expected, load, model, optim, path, into=optim.state_dict())
    _refused(expected, load, model, optim, path, form="full")

    fresh_model, fresh = make("fsdp2")  # the way that the error tells
    state = {"optim": get_optimizer_state_dict(fresh_model, fresh)}
    dcp.load(state, checkpoint_id=path)
    set_optimizer_state_dict(fresh_model, fresh, state["optim"])
    assert_same(state_of(fresh)["state"], state_of(optim)["state"])
    save(fresh_model, fresh, f"{path}/again")
    again_model, again = make("fsdp2")
    again.load_state_dict(load(again_model, again, f"{path}/again"))
    assert_same(state_of(again)["state"], state_of(optim)["state"])


@needs_torchao
def test_checkpoint_of_stock(tmp_path: Path) -> None:
    run_ranks(_stock, 2, str(tmp_path))


def test_other_subclasses_are_refused(tmp_path: Path) -> None:
    """Not saved as something else: what their tensors mean is not known."""
    model = nn.Linear(4, 3, bias=False)
    optim = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optim.step()
    state = optim.state[model.weight]
    state["exp_avg"] = TwoTensor(state["exp_avg"], state["exp_avg"])
    _refused("weight.exp_avg: .* found a TwoTensor", save, model, optim, tmp_path)
    assert not any(tmp_path.iterdir())
