"""Random models, wrappings and worlds: what one job saves, another must load to the bit.

A :class:`Job` is drawn from a seed.  Its source and its destination have the same parameters
and the same kind of optimizer, and everything else of their own: world size, units, strategy,
``use_orig_params``, device mesh or none, who saves and who loads (ours or stock).
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy

from dcp_fsdp_osd import (
    FlatOptimLoadPlanner,
    FlatOptimSavePlanner,
    StreamingReader,
    StreamingWriter,
)
from tests import ranks
from tests.models import full_state

__all__ = ["Job", "Side", "build", "draw", "load", "releasing", "save", "train"]

OPTIMIZERS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01),
    "amsgrad": lambda groups: torch.optim.AdamW(groups, lr=0.01, amsgrad=True),
    "fused": lambda groups: torch.optim.AdamW(groups, lr=0.01, fused=True),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.01),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.01),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.01, momentum=0.5, centered=True),
}
_STRATEGIES = ("FULL_SHARD", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
_HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
P = ParamSpec("P")
T = TypeVar("T")
Tree = tuple[list[tuple[int, ...]], list[Any]]


@dataclass(frozen=True)
class Side:
    """How one job wraps the model.  ``wrapped`` is the share of submodules that are units."""

    world: int
    strategy: str
    use_orig_params: bool
    wrapped: float
    seed: int
    mesh: bool
    groups: int
    by: str


@dataclass(frozen=True)
class Job:
    """``tree`` is (shapes of a module's parameters, its submodules' trees)."""

    tree: Tree = field(repr=False)
    optimizer: str
    dtype: torch.dtype
    streaming: bool
    live: bool
    equal_groups: bool
    source: Side
    target: Side


class Node(nn.Module):
    """Parameters of any shapes, and submodules; adds some function of each to its input."""

    def __init__(self, tree: Tree) -> None:
        super().__init__()
        for number, shape in enumerate(tree[0]):
            setattr(self, f"p{number}", nn.Parameter(torch.randn(*shape)))
        self.kids = nn.ModuleList(Node(kid) for kid in tree[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for parameter in self.parameters(recurse=False):
            x = x + (parameter * parameter * (1 + 0.1 * parameter)).float().mean()
        for kid in self.kids:
            x = kid(x)
        return x


def _tree(rng: random.Random, depth: int = 0) -> Tree:
    shapes = [
        tuple(rng.choice((1, 2, 3, 5, 7, 11)) for _ in range(rng.choice((1, 1, 2, 2, 2, 3, 4))))
        for _ in range(rng.randint(depth == 0, 4))
    ]
    kids = [_tree(rng, depth + 1) for _ in range(rng.randint(0, 3) if depth < 2 else 0)]
    return (shapes or ([] if kids else [(3,)]), kids)


def _side(rng: random.Random, by: str, worlds: tuple[int, ...]) -> Side:
    strategy = rng.choice((*_STRATEGIES, *_HYBRID) if by == "ours" else _STRATEGIES[:3])
    squares = tuple(world for world in worlds if world >= 4 and world % 2 == 0)
    return Side(
        world=rng.choice(squares if strategy in _HYBRID else worlds),
        strategy=strategy,
        use_orig_params=rng.random() < 0.6,
        wrapped=rng.choice((0, 0.3, 0.7, 1)),
        seed=rng.randrange(10**6),
        mesh=strategy not in _HYBRID and rng.random() < 0.3,
        groups=rng.choice((1, 1, 2, 3)),
        by=by,
    )


def draw(seed: int, worlds: tuple[int, ...] = (1, 2, 3, 4)) -> Job:
    """The job of a seed, of `worlds`; 4 or more even ranks are one of them."""
    rng = random.Random(seed)
    savers = rng.choice((("ours", "ours"), ("ours", "ours"), ("ours", "stock"), ("stock", "ours")))
    source, target = (_side(rng, by, worlds) for by in savers)
    if target.by == "stock":
        # It loads groups by their position.  And with ShardedTensor, which FSDP1 makes without a
        # mesh, it fails where a rank holds no row of some parameter.
        source, target = replace(source, groups=1), replace(target, groups=1, mesh=True)
    return Job(
        tree=_tree(rng),
        optimizer=rng.choice(tuple(OPTIMIZERS)),
        dtype=rng.choice((torch.float32, torch.float32, torch.float32, torch.bfloat16)),
        streaming=rng.random() < 0.7,
        live=rng.random() < 0.3,
        # Options go by parameter, so they can only differ where parameters keep their names.
        equal_groups=not (
            source.use_orig_params and target.use_orig_params and source.groups == target.groups
        ),
        source=source,
        target=target,
    )


_built: list[FSDP] = []


def releasing(fn: Callable[P, T]) -> Callable[P, T]:
    """A function on a rank after which the models that it has built are gone.

    FSDP1's flat parameters and the views of them hold each other, partly from C++, where no
    garbage collection sees it (without any checkpoint, too): a process that makes one model after
    another would keep them all, with their process groups.
    """

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return fn(*args, **kwargs)
        finally:
            for model in _built:
                for module in FSDP.fsdp_modules(model):
                    if module._handle is not None:
                        vars(module._handle.flat_param).clear()
                        vars(module._handle).clear()
            _built.clear()

    return call


def build(job: Job, side: Side, seed: int) -> tuple[FSDP, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    rng = random.Random(side.seed)
    world = dist.get_world_size()
    mesh = None
    if side.strategy in _HYBRID:
        mesh = ranks.mesh(2, world // 2)
    elif side.mesh:
        mesh = ranks.mesh(world)

    def wrap(module: nn.Module, root: bool = False) -> nn.Module:
        kids = module.kids
        for number, kid in enumerate(list(kids)):
            kids[number] = wrap(kid)
        if not root and rng.random() >= side.wrapped:
            return module
        return FSDP(
            module,
            use_orig_params=side.use_orig_params,
            sharding_strategy=ShardingStrategy[side.strategy],
            device_id=torch.device("cpu"),
            device_mesh=mesh,
        )

    model = wrap(Node(job.tree).to(job.dtype), root=True)
    _built.append(model)
    groups: list[dict[str, Any]] = [{"params": list(model.parameters())}]
    if side.use_orig_params and side.groups > 1:
        groups = [{"params": []} for _ in range(side.groups)]
        for name, parameter in model.named_parameters():
            name_length = len(name.replace("_fsdp_wrapped_module.", ""))
            groups[name_length % side.groups]["params"].append(parameter)
    for number, group in enumerate(groups):
        group["weight_decay"] = 0.0 if job.equal_groups else 0.1 * number
    return model, OPTIMIZERS[job.optimizer](groups)


def train(model: nn.Module, optim: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        model(torch.zeros(()) + 0.1 * dist.get_rank()).backward()
        optim.step()
        optim.zero_grad()


def _snapshot(model: nn.Module, optim: torch.optim.Optimizer) -> list[torch.Tensor]:
    state = (value for each in optim.state.values() for value in each.values())
    values = [*model.parameters(), *(value for value in state if isinstance(value, torch.Tensor))]
    return [torch.get_rng_state(), *(value.detach().clone() for value in values)]


@releasing
def save(rank: int, world: int, job: Job, path: str) -> dict[str, Any]:
    """Train and save; returns the whole state by stock's gather."""
    model, optim = build(job, job.source, seed=1)
    train(model, optim, 2)
    writer = StreamingWriter(path) if job.streaming else dcp.FileSystemWriter(path)
    if job.source.by == "stock":
        dcp.save({"optim": get_optimizer_state_dict(model, optim)}, storage_writer=writer)
        return full_state(model, optim)
    before = _snapshot(model, optim)
    planner = FlatOptimSavePlanner(model, optim)
    dcp.save({"optim": optim.state_dict()}, storage_writer=writer, planner=planner)
    after = _snapshot(model, optim)
    if not all(torch.equal(one, two) for one, two in zip(before, after, strict=True)):
        raise AssertionError("saving changed parameters, optimizer state or random state")
    return full_state(model, optim)


@releasing
def load(rank: int, world: int, job: Job, path: str) -> dict[str, Any]:
    """Load into another model and optimizer, and be able to train on; returns the whole state."""
    model, optim = build(job, job.target, seed=9)
    reader = StreamingReader(path) if job.streaming else dcp.FileSystemReader(path)
    if job.target.by == "stock":
        state = {"optim": get_optimizer_state_dict(model, optim)}
        dcp.load(state, storage_reader=reader)
        set_optimizer_state_dict(model, optim, state["optim"])
    else:
        if job.live:
            train(model, optim, 1)
        state = {"optim": optim.state_dict() if job.live else {}}
        dcp.load(state, storage_reader=reader, planner=FlatOptimLoadPlanner(model, optim))
        optim.load_state_dict(state["optim"])
    full = full_state(model, optim)
    train(model, optim, 1)
    return full
