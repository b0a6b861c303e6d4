"""FlatModelState: stock's checkpoints are ours and ours are stock's, bit for bit.

The judge is ``get_model_state_dict`` (stock's gather), before the save and after the load.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, StateDictType, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.wire import WireBytes
from dcp_fsdp_osd import (
    FlatModelState,
    FlatOptimLoadPlanner,
    FlatOptimSavePlanner,
    FlatOptimState,
    StreamingReader,
    StreamingWriter,
    verify_model_state,
)
from dcp_fsdp_osd.stateful.guard import GUARD_KEY
from tests import ranks
from tests.breadth import always
from tests.models import MODELS, Block, Conv, Mlp, adamw, inner, train_steps, wrap_fsdp1
from tests.planners.checks import assert_same
from tests.planners.test_two_dims import LAYOUTS
from tests.ranks import RankError, run_ranks

KINDS = ["fsdp1", "fsdp1_flat", "fsdp1_dtensor", "hybrid", "no_shard", "fsdp2", "ddp", "plain"]
BF16 = torch.bfloat16


class _Extra(nn.Linear):
    """A layer with an extra state, which may be anything that DCP can save."""

    def __init__(self, state: Any) -> None:
        super().__init__(6, 6)
        self.extra = state

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


class Rich(Mlp):
    """All that a state dict may hold beside trained parameters."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed=seed)
        torch.manual_seed(seed)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("table", torch.randn(3, 5))
        self.register_buffer("passing", torch.randn(7), persistent=False)
        self.register_buffer("nothing", None)
        self.apart = nn.Linear(3, 6)  # an ignored module
        self.scale = nn.Parameter(torch.randn(()))  # FSDP1 takes no scalars: ignored
        self.object = _Extra({"amax": torch.full((3,), float(seed)), "recipe": f"e{seed}"})
        self.blob = _Extra(torch.full((4 + seed,), seed, dtype=torch.uint8))
        self.first.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        x = self.norm((self.apart(x.float()) * self.scale).to(x.dtype))
        return self.blob(self.object(x)) + self.table.sum()


def wrap_rich(model: Rich, **options: Any) -> FSDP:
    ignored = [*model.apart.parameters(), model.scale]
    return wrap_fsdp1(model, ignored_states=ignored, **options)


def wrap(kind: str, model: nn.Module, world: int, **options: Any) -> nn.Module:
    if kind == "fsdp1_flat":
        return wrap_fsdp1(model, use_orig_params=False, **options)
    if kind == "fsdp1_dtensor":
        return wrap_fsdp1(model, device_mesh=ranks.mesh(world), **options)
    if kind == "hybrid":
        mesh = ranks.mesh(2, world // 2, names=("copies", "shards"))
        return wrap_fsdp1(model, strategy="HYBRID_SHARD", device_mesh=mesh, **options)
    if kind == "no_shard":
        return wrap_fsdp1(model, strategy="NO_SHARD", **options)
    if kind == "fsdp1":
        return wrap_fsdp1(model, **options)
    if kind == "fsdp2":
        for module in model.modules():
            if isinstance(module, Block):
                fully_shard(module)
        return fully_shard(model)
    return DistributedDataParallel(model) if kind == "ddp" else model


def full(model: nn.Module) -> dict[str, Any]:
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()}


def save(model: nn.Module, path: str, **options: Any) -> None:
    planner = FlatOptimSavePlanner(model, {}, **options)
    state = {"model": FlatModelState(model)}
    dcp.save(state, storage_writer=StreamingWriter(path, fsync=False), planner=planner)


def load(model: nn.Module, path: str, **options: Any) -> FlatOptimLoadPlanner:
    planner = FlatOptimLoadPlanner(model, {}, **options)
    state = {"model": FlatModelState(model)}
    dcp.load(state, storage_reader=StreamingReader(path), planner=planner)
    return planner


def stock_save(model: nn.Module, path: str) -> None:
    dcp.save({"model": get_model_state_dict(model)}, storage_writer=FileSystemWriter(path))


def stock_load(model: nn.Module, path: str) -> None:
    state = {"model": get_model_state_dict(model)}
    dcp.load(state, storage_reader=FileSystemReader(path))
    set_model_state_dict(model, state["model"])


# ------------------------------------------------------------------- layouts, both ways


def _save_both(rank: int, world: int, path: str, kind: str) -> Any:
    model = wrap(kind, Mlp(), world)
    train_steps(model, adamw(model), 2)
    expected = full(model)
    with WireBytes() as wire:
        save(model, path + "/ours")
    assert wire.tensors < 4096
    stock_save(model, path + "/stock")
    return expected


def _load_both(rank: int, world: int, path: str, kind: str, expected: Any) -> None:
    for place, read in (("ours", load), ("stock", load), ("ours", stock_load)):
        model = wrap(kind, Mlp(seed=7), world)
        with WireBytes() as wire:
            read(model, f"{path}/{place}")
        assert read is stock_load or wire.tensors < 4096
        assert_same(full(model), expected)


@pytest.mark.parametrize("kind", always(["hybrid", "fsdp2", "plain"], KINDS))
def test_layouts(tmp_path: Path, kind: str) -> None:
    """Saved in each layout by us and by stock, loaded in others; and the reverse."""
    expected = run_ranks(_save_both, 1 if kind == "plain" else 4, str(tmp_path / "a"), kind)[0]
    run_ranks(_load_both, 3, str(tmp_path / "a"), "fsdp1_flat", expected)
    expected = run_ranks(_save_both, 3, str(tmp_path / "b"), "fsdp1")[0]
    run_ranks(_load_both, 1 if kind == "plain" else 4, str(tmp_path / "b"), kind, expected)


def _models(rank: int, world: int, path: str, name: str) -> None:
    for use_orig_params in (True, False):
        if name == "frozen_mixed" and not use_orig_params:
            continue
        model = wrap_fsdp1(MODELS[name](), use_orig_params=use_orig_params)
        optim = adamw(model)
        train_steps(model, optim, 1)
        place = f"{path}/{use_orig_params}"
        save(model, place)
        stock_save(model, place + "-stock")
        _same_entries(place, place + "-stock")
        other = use_orig_params if name == "frozen_mixed" else not use_orig_params
        again = wrap_fsdp1(MODELS[name](seed=9), use_orig_params=other)
        load(again, place)
        assert_same(full(again), full(model))


def _same_entries(ours: str, stock: str) -> None:
    """The same keys, shapes, dtypes and paths; the boxes are each side's own."""
    left, right = (FileSystemReader(path).read_metadata() for path in (ours, stock))
    assert _entries(left) == _entries(right)
    assert left.planner_data == right.planner_data


def _entries(metadata: Any) -> Any:
    return {
        key: (type(value), getattr(value, "size", None), getattr(value, "properties", None))
        if not hasattr(value, "properties")
        else (type(value), value.size, value.properties.dtype)
        for key, value in metadata.state_dict_metadata.items()
    }


@pytest.mark.parametrize("name", always(["frozen_mixed", "odd", "tied"], sorted(MODELS)))
def test_models(tmp_path: Path, name: str) -> None:
    run_ranks(_models, 3, str(tmp_path), name)


def _sharded_type(rank: int, world: int, path: str) -> None:
    model = wrap_fsdp1(Mlp())
    save(model, path + "/ours")
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = {"model": model.state_dict()}
        dcp.save(state, storage_writer=FileSystemWriter(path + "/stock"))
    _same_entries(path + "/ours", path + "/stock")
    again = wrap_fsdp1(Mlp(seed=4), policy="root")
    with FSDP.state_dict_type(again, StateDictType.SHARDED_STATE_DICT):
        state = {"model": again.state_dict()}
        dcp.load(state, storage_reader=FileSystemReader(path + "/ours"))
        again.load_state_dict(state["model"])
    assert_same(full(again), full(model))


def test_sharded_state_dict_type(tmp_path: Path) -> None:
    run_ranks(_sharded_type, 2, str(tmp_path))


def _two_dims(rank: int, world: int, path: str, saved: str, loaded: str) -> None:
    """FSDP over tensor parallelism; uneven sizes, which stock cannot gather, are below."""
    model = LAYOUTS[saved](world, uneven=False)
    place = f"{path}/ours"
    save(model, place)
    again, plain = (LAYOUTS[kind](world, uneven=False) for kind in (loaded, "one process"))
    for target in (again, plain):
        with torch.no_grad():
            for parameter in target.parameters():
                parameter.zero_()
        load(target, place)
        assert verify_model_state(target, place).ok
    assert_same(plain.state_dict(), LAYOUTS["one process"](1, uneven=False).state_dict())
    stock_save(model, path + "/stock")
    _same_entries(place, path + "/stock")
    load(again, path + "/stock")
    assert_same(full(again), full(model))
    assert verify_model_state(again, path + "/stock").ok


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("FSDP1 flat over TP", "FSDP2 over TP"),
        ("TP", "FSDP1 over TP"),
        pytest.param("FSDP1 over TP", "FSDP1 flat over TP", marks=pytest.mark.slow),
        pytest.param("FSDP2 over TP", "FSDP1 over TP", marks=pytest.mark.slow),
    ],
)
def test_two_dimensions(tmp_path: Path, saved: str, loaded: str) -> None:
    run_ranks(_two_dims, 4, str(tmp_path / "save"), saved, loaded)


def _gathered(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole parameters where stock's state dict cannot be gathered: FSDP1 over uneven shards."""
    fsdp1 = isinstance(model, FSDP)
    with FSDP.summon_full_params(model) if fsdp1 else contextlib.nullcontext():
        return {
            name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
            for name, value in model.named_parameters()
        }


def _uneven_trained(rank: int, world: int, path: str) -> None:
    """From each layout to the next, of which the last has tensor parallelism of another degree."""
    names = ["FSDP1 over TP", "FSDP2 over TP", "FSDP1 flat over TP", "TP"]
    for name, following in zip(names, [*names[1:], names[0]], strict=True):
        model = LAYOUTS[name](world)
        optim = adamw(model)
        for step in range(2):
            model((torch.arange(5) + step) % 11).pow(2).mean().backward()
            optim.step()
            optim.zero_grad()
        expected = _gathered(model)
        save(model, f"{path}/{name}")
        for target in (LAYOUTS[following](world), LAYOUTS["one process"](1)):
            load(target, f"{path}/{name}")
            assert_same(_gathered(target), expected)
            assert verify_model_state(target, f"{path}/{name}").ok


def test_uneven_tensor_parallelism_after_training(tmp_path: Path) -> None:
    run_ranks(_uneven_trained, 4, str(tmp_path))


def _channels_last(rank: int, world: int, path: str) -> None:
    model = wrap_fsdp1(Conv(channels_last=True), policy="root")
    save(model, path)
    for last in (True, False):
        again = wrap_fsdp1(Conv(seed=3, channels_last=last), policy="root")
        load(again, path)
        assert_same(full(again), full(model))
    again = wrap_fsdp1(Conv(seed=3), policy="root")
    stock_load(again, path)
    assert_same(full(again), full(model))


def test_memory_order(tmp_path: Path) -> None:
    run_ranks(_channels_last, 2, str(tmp_path))


# ------------------------------------------------------------------- all that a model has

MIXED = MixedPrecision(param_dtype=BF16, reduce_dtype=BF16, buffer_dtype=BF16)


def _rich(rank: int, world: int, path: str, options: dict[str, Any]) -> None:
    model = wrap_rich(Rich(seed=1), **options)
    with torch.no_grad():
        model.eval()(torch.ones(2, 6))  # casts buffers
    save(model, path)
    expected = full(model)
    assert expected["table"].dtype == torch.float32 and "passing" not in expected
    stock_save(model, path + "-stock")
    _same_entries(path, path + "-stock")
    for place in (path, path + "-stock"):
        again = wrap_rich(Rich(seed=2), **options)
        with torch.no_grad():
            again.eval()(torch.ones(2, 6))
        kept = inner(again).passing.clone()
        load(again, place)
        assert_same(full(again), expected)
        assert_same(inner(again).passing, kept)
        assert_same(inner(again).object.extra, inner(model).object.extra)
        with torch.no_grad():
            assert_same(again(torch.ones(2, 6)), model(torch.ones(2, 6)))
    plain = Rich(seed=3)
    load(plain, path)
    assert_same(full(plain), expected)


def _rich_policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    """With ``use_orig_params=False`` a unit is frozen as a whole or not at all.

    Stock cannot take the state dict of a unit that has an extra state itself.
    """
    return recurse or type(module) is nn.Linear


@pytest.mark.each_value
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("mixed", [None, MIXED])
def test_all_that_a_model_has(tmp_path: Path, mixed: Any, use_orig_params: bool) -> None:
    options: dict[str, Any] = {"mixed_precision": mixed, "use_orig_params": use_orig_params}
    if not use_orig_params:
        options["policy"] = _rich_policy
    run_ranks(_rich, 2, str(tmp_path / "save"), options)


def _wrappers(rank: int, world: int, path: str) -> None:
    """Names are the unwrapped model's, whatever is around FSDP1, under it and between."""
    plain = Mlp()
    model: nn.Module = Mlp()
    model.register_buffer("table", torch.ones(3))
    for n, block in enumerate(model.blocks):
        model.blocks[n] = torch.compile(checkpoint_wrapper(block), backend="eager")
    model = wrap_fsdp1(model, mixed_precision=MIXED)
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    with FSDP.summon_full_params(model):
        pass  # the first of its kind: buffers are cast
    assert inner(model).table.dtype == BF16
    model = torch.compile(model, backend="eager")
    save(model, path)
    names = set(FlatModelState(model).state_dict()) - {GUARD_KEY}
    assert names == {*plain.state_dict(), "table"}
    metadata = FileSystemReader(path).read_metadata()
    assert metadata.state_dict_metadata["model.table"].properties.dtype == torch.float32
    again = Mlp(seed=2)
    again.register_buffer("table", torch.zeros(3))
    load(again, path)
    assert_same(again.state_dict(), {**plain.state_dict(), "table": torch.ones(3)})


def test_wrappers(tmp_path: Path) -> None:
    run_ranks(_wrappers, 2, str(tmp_path))


# ------------------------------------------------------------------- FSDP's states


def _next_forward(rank: int, world: int, path: str, options: dict[str, Any]) -> None:
    """What is loaded counts at once, whatever FSDP1 still holds from the forward before."""
    model = wrap_fsdp1(Mlp(), **options)
    optim = adamw(model)
    train_steps(model, optim, 2)
    state = {"model": FlatModelState(model), "optim": FlatOptimState(model, optim)}
    writer = StreamingWriter(path, fsync=False)
    dcp.save(state, storage_writer=writer, planner=FlatOptimSavePlanner(model, optim))
    x = torch.ones(2, 6)
    with torch.no_grad():
        expected = model(x)
    losses = train_steps(model, optim, 2, first=2)
    for forward in ("none", "eval", "train"):
        again = wrap_fsdp1(Mlp(seed=5), **options)
        other = adamw(again)
        if forward != "none":
            with torch.set_grad_enabled(forward == "train"):
                again(x)
        state = {"model": FlatModelState(again), "optim": FlatOptimState(again, other)}
        planner = FlatOptimLoadPlanner(again, other)
        dcp.load(state, storage_reader=StreamingReader(path), planner=planner)
        with torch.no_grad():
            assert_same(again(x), expected)
        if forward == "train":
            continue  # FSDP1 itself trains otherwise after a forward whose backward never came
        assert train_steps(again, other, 2, first=2) == losses
        assert_same(full(again), full(model))


@pytest.mark.each_value
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"strategy": "SHARD_GRAD_OP"},
        {"strategy": "NO_SHARD"},
        {"mixed_precision": MixedPrecision(param_dtype=BF16)},
        {"strategy": "NO_SHARD", "mixed_precision": MixedPrecision(param_dtype=BF16)},
    ],
)
def test_the_next_forward(tmp_path: Path, options: dict[str, Any], use_orig_params: bool) -> None:
    options = {**options, "use_orig_params": use_orig_params}
    run_ranks(_next_forward, 2, str(tmp_path / "save"), options)


def _in_use(rank: int, world: int, path: str, where: str) -> None:
    model = wrap_fsdp1(Mlp())
    if where == "summon":
        with FSDP.summon_full_params(model):
            save(model, path)
    if where == "forward":
        inner(model).first.register_forward_hook(lambda *_: save(model, path))
    output = model(torch.ones(1, 6))
    output.register_hook(lambda _: save(model, path))
    output.sum().backward()


@pytest.mark.parametrize("where", ["summon", "forward", "backward"])
def test_parameters_in_use_are_refused(tmp_path: Path, where: str) -> None:
    with pytest.raises(RankError, match="expected FSDP's parameters to be sharded") as caught:
        run_ranks(_in_use, 2, str(tmp_path), where)
    assert caught.value.all_raised("LayoutError")


def _replaced(rank: int, world: int, path: str) -> None:
    model = wrap_fsdp1(Mlp(), policy="root")
    weight = inner(model).first.weight
    weight.data = weight.data + 1  # FSDP1 takes it over at the next forward
    save(model, path)
    expected = full(model)
    again = wrap_fsdp1(Mlp(seed=3), policy="root")
    other = inner(again).first.weight
    other.data = other.data + 2
    load(again, path)
    assert_same(full(again), expected)
    with torch.no_grad():
        assert_same(again(torch.ones(2, 6)), model(torch.ones(2, 6)))


def test_a_replaced_parameter(tmp_path: Path) -> None:
    run_ranks(_replaced, 2, str(tmp_path))


# ------------------------------------------------------------------- what does not match


class _Other(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.new = nn.Linear(6, 6, bias=False)
        self.register_buffer("table", torch.zeros(3))
        del self.blocks[1]


def _mismatch(rank: int, world: int, path: str, strict: bool) -> Any:
    save(wrap_fsdp1(Mlp()), path)
    model = wrap_fsdp1(_Other(), policy="root")
    before = full(model)
    planner = FlatOptimLoadPlanner(model, {}, strict=strict)
    state = {"model": FlatModelState(model)}
    try:
        dcp.load(state, storage_reader=StreamingReader(path), planner=planner)
    except BaseException:
        assert_same(full(model), before)
        raise
    after, whole = full(model), full(Mlp())
    for name, value in after.items():
        skipped = any(line.startswith(f"{name}:") for line in planner.skipped)
        assert_same(value, before[name] if skipped else whole[name])
    return planner.skipped


LINES = (
    "first.weight: shape (6, 6) in the checkpoint, (7, 6) in the model",
    "new.weight: not in the checkpoint",
    "table: not in the checkpoint",
    "blocks.1.up.weight: in the checkpoint, but the model has no such entry",
)


def test_mismatches_are_told_together_and_before_anything_is_touched(tmp_path: Path) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(_mismatch, 2, str(tmp_path), True)
    assert caught.value.all_raised("CheckpointMismatchError")
    assert not any("AssertionError" in f.types for f in caught.value.failures.values())
    for failure in caught.value.failures.values():
        assert all(line in failure.message for line in LINES)


def test_mismatches_are_skipped_on_demand(tmp_path: Path) -> None:
    for skipped in run_ranks(_mismatch, 2, str(tmp_path), False):
        assert set(LINES) <= set(skipped)


def _cast(rank: int, world: int, path: str, broadcast: bool) -> None:
    model = wrap_fsdp1(Mlp())
    save(model, path)
    for strategy in ("FULL_SHARD", "NO_SHARD"):
        low = wrap_fsdp1(Mlp(seed=2).to(BF16), strategy=strategy)
        planner = load(low, path, broadcast=broadcast)
        assert (planner.exchanged is not None) == (broadcast and strategy == "NO_SHARD")
        assert_same(full(low), {name: value.to(BF16) for name, value in full(model).items()})


@pytest.mark.parametrize("broadcast", [False, True])
def test_other_dtypes_are_cast_as_by_stock(tmp_path: Path, broadcast: bool) -> None:
    run_ranks(_cast, 2, str(tmp_path), broadcast)


def _read_once(rank: int, world: int, path: str) -> None:
    """What all ranks want alike: buffers, extra states, whole copies of weights."""
    model = wrap_rich(Rich(seed=1))
    save(model, path)
    for options in ({"strategy": "NO_SHARD"}, {}):
        again = wrap_rich(Rich(seed=2), **options)
        planner = load(again, path, broadcast=True)
        assert planner.exchanged is not None
        assert_same(full(again), full(model))


def test_read_once_and_handed_on(tmp_path: Path) -> None:
    run_ranks(_read_once, 3, str(tmp_path))


def _stock_planner(rank: int, world: int, path: str, call: str) -> None:
    model = wrap_fsdp1(Mlp())
    state = {"model": FlatModelState(model)}
    if call == "save":
        dcp.save(state, storage_writer=FileSystemWriter(path))
    elif call == "load":
        save(model, path)
        dcp.load(state, storage_reader=FileSystemReader(path))
    else:
        state["model"].load_state_dict(state["model"].state_dict())


@pytest.mark.parametrize("call", ["save", "load", "neither"])
def test_other_planners_are_refused(tmp_path: Path, call: str) -> None:
    with pytest.raises(
        RankError, match=r"planner=FlatOptim(Save|Load)Planner\(\)|__needs_FlatOptim"
    ):
        run_ranks(_stock_planner, 2, str(tmp_path), call)


class _Hooked(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.first.register_state_dict_post_hook(lambda *_: None)


class _Overridden(Mlp):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {"outer": super().state_dict(*args, **kwargs)}


class _Metric(nn.Module):
    """Has a state dict of its own, as torchmetrics' metrics have; empty, as a rule."""

    def __init__(self, kept: bool) -> None:
        super().__init__()
        self.total, self.kept = torch.tensor(1.0), kept

    def state_dict(self, *args: Any, destination: Any = None, **kwargs: Any) -> Any:
        return {"total": self.total} if self.kept else {}


class _OwnLinear(nn.Linear):
    """Whose parameters are flattened, so that it looks as if it had none."""

    def state_dict(self, *args: Any, destination: Any = None, **kwargs: Any) -> Any:
        return {}


class _WithPart(Mlp):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part


def _hooks(rank: int, world: int, path: str) -> None:
    for use_orig_params in (True, False):
        for model, text in (
            (_Hooked(), "first"),
            (_Overridden(), "state_dict"),
            (_WithPart(_Metric(kept=True)), "part (_Metric)"),
            (_WithPart(nn.Sequential(_OwnLinear(3, 5))), "part.0 (_OwnLinear)"),
        ):
            wrapped = wrap_fsdp1(model, use_orig_params=use_orig_params)
            with pytest.raises(ValueError, match="FlatModelState passes over") as caught:
                FlatModelState(wrapped).state_dict()
            assert text in str(caught.value)
    fine = FlatModelState(wrap_fsdp1(_WithPart(_Metric(kept=False)))).state_dict()
    assert not any(name.startswith("part") for name in fine)


def test_modules_that_change_their_state_dict_are_refused(tmp_path: Path) -> None:
    run_ranks(_hooks, 1, str(tmp_path))


# ------------------------------------------------------------------- places


def _places(rank: int, world: int, path: str) -> None:
    """Nested keys, several models, and a model beside its optimizer, from an async save too."""
    models = [wrap_fsdp1(Mlp(seed=n)) for n in range(2)]
    optim = adamw(models[0])
    train_steps(models[0], optim, 1)
    keys = ("app.first", "second")

    def state(models: list[nn.Module], optim: torch.optim.Optimizer) -> dict[str, Any]:
        first, second = (FlatModelState(model) for model in models)
        app = {"first": first.state_dict(), "optim": FlatOptimState(models[0], optim).state_dict()}
        return {"app": app, "second": second, "step": 5}

    planner = FlatOptimSavePlanner(models[0], {"app.optim": optim}, model_key=keys)
    writer = StreamingWriter(path, fsync=False)
    dcp.async_save(
        state(models, optim), storage_writer=writer, planner=planner, process_group=dist.new_group()
    ).result()
    again = [wrap_fsdp1(Mlp(seed=n + 5), use_orig_params=False) for n in range(2)]
    other = adamw(again[0])
    planner = FlatOptimLoadPlanner(again[0], {"app.optim": other}, model_key=keys)
    loaded = state(again, other)
    dcp.load(loaded, storage_reader=StreamingReader(path), planner=planner)
    FlatModelState(again[0]).load_state_dict(loaded["app"]["first"])
    assert loaded["step"] == 5
    for left, right in zip(again, models, strict=True):
        assert_same(full(left), full(right))


def test_places(tmp_path: Path) -> None:
    run_ranks(_places, 2, str(tmp_path))
