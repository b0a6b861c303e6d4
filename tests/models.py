"""Small models for the tests, ways to wrap them, and deterministic training.

Every model here is made of the same values wherever it is built (``seed``), on any rank and in
any world, and knows how to make input for itself: ``model.batch(generator)``.  ``MODELS`` maps
names to builders, so that a test can run over all of them and pass a name to a rank.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, lambda_auto_wrap_policy
from torch.nn import functional as F

from tests.torch_gaps import train_fsdp2_on_cpu

__all__ = [
    "MODELS",
    "Block",
    "Conv",
    "Experts",
    "FrozenBlock",
    "FrozenMixed",
    "Mlp",
    "Odd",
    "Tied",
    "Transformer",
    "adamw",
    "full_state",
    "inner",
    "train_steps",
    "two_groups",
    "wrap_blocks",
    "wrap_fsdp1",
    "wrap_fsdp1_inside",
    "wrap_linears",
]


class _Sample(nn.Module):
    """A model that makes its own input: a batch of ``width`` features."""

    width: int

    def batch(self, generator: torch.Generator, rows: int = 4) -> torch.Tensor:
        return torch.randn(rows, self.width, generator=generator)


class Block(nn.Module):
    """Two linear layers with a residual; the unit that :func:`wrap_blocks` wraps."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Mlp(_Sample):
    """``depth`` blocks between two linear layers."""

    def __init__(self, width: int = 6, hidden: int = 10, depth: int = 2, seed: int = 0) -> None:
        super().__init__()
        self.width = width
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.first = nn.Linear(width, width)
            self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(depth))
            self.last = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Odd(_Sample):
    """Shapes that divide by nothing: 3 rows, one element, one row, a 3-D and an empty tensor."""

    def __init__(self, seed: int = 0, *, empty: bool = False) -> None:
        super().__init__()
        self.width = 7
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.three_rows = nn.Linear(7, 3)
            self.one = nn.Parameter(torch.randn(1))
            self.one_row = nn.Parameter(torch.randn(1, 5))
            self.cube = nn.Parameter(torch.randn(3, 5, 2))
            self.blocks = nn.ModuleList([Block(3, 1), Block(3, 5)])
            if empty:
                self.empty = nn.Parameter(torch.empty(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.three_rows(x) * self.one
        for block in self.blocks:
            x = block(x)
        y = torch.einsum("bi,ijk->bjk", x, self.cube) * self.one_row[..., None]
        return y.flatten(1)


class Conv(_Sample):
    """4-D weights; ``channels_last`` stores them in that memory format."""

    def __init__(self, seed: int = 0, *, channels_last: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.conv1 = nn.Conv2d(3, 5, (3, 2))
            self.norm = nn.GroupNorm(1, 5)
            self.conv2 = nn.Conv2d(5, 2, 1, bias=False)
        if channels_last:
            self.to(memory_format=torch.channels_last)

    def batch(self, generator: torch.Generator, rows: int = 2) -> torch.Tensor:
        return torch.randn(rows, 3, 5, 4, generator=generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv2(torch.tanh(self.norm(self.conv1(x)))).flatten(1)


class _TiedHead(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


class Tied(_Sample):
    """An embedding and a head that share one weight: ``embed.weight`` is ``head.weight``."""

    def __init__(self, words: int = 11, width: int = 6, seed: int = 0) -> None:
        super().__init__()
        self.words = words
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embed = nn.Embedding(words, width)
            self.blocks = nn.ModuleList([Block(width, 5)])
            self.head = _TiedHead(self.embed.weight)

    def batch(self, generator: torch.Generator, rows: int = 4) -> torch.Tensor:
        return torch.randint(self.words, (rows,), generator=generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Transformer(_Sample):
    """A decoder of ``depth`` layers: embedding, causal attention, feed-forward, norms, head."""

    def __init__(
        self, words: int = 13, width: int = 8, heads: int = 2, depth: int = 2, seed: int = 0
    ) -> None:
        super().__init__()
        self.words = words
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embed = nn.Embedding(words, width)
            self.layers = nn.ModuleList(_Layer(width, heads) for _ in range(depth))
            self.norm = nn.LayerNorm(width)
            self.head = nn.Linear(width, words, bias=False)

    def batch(self, generator: torch.Generator, rows: int = 2) -> torch.Tensor:
        return torch.randint(self.words, (rows, 5), generator=generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class _Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.feed = Block(width, 3 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        q, k, v = (
            part.view(batch, time, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm(x)).split(width, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.feed(x + self.out(mixed.transpose(1, 2).reshape(batch, time, width)))


class FrozenMixed(Mlp):
    """Frozen parameters beside trained ones in one module (with ``use_orig_params=True`` only)."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed=seed)
        self.first.weight.requires_grad_(False)
        self.blocks[0].up.bias.requires_grad_(False)
        self.blocks[1].down.weight.requires_grad_(False)


class FrozenBlock(Mlp):
    """One whole block frozen, so that its FSDP unit is too (either ``use_orig_params``)."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed=seed)
        self.blocks[0].requires_grad_(False)


class Experts(_Sample):
    """Four blocks of which rank r uses number ``r % 4``: the others get no gradient there."""

    def __init__(self, seed: int = 0, use: Iterable[int] | None = None) -> None:
        super().__init__()
        self.width = 6
        self.use = None if use is None else list(use)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.blocks = nn.ModuleList(Block(6, 5) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        use = self.use if self.use is not None else [dist.get_rank() % 4]
        for number in use:
            x = self.blocks[number](x)
        return x


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "mlp": Mlp,
    "odd": Odd,
    "conv": Conv,
    "tied": Tied,
    "transformer": Transformer,
    "frozen_mixed": FrozenMixed,
    "frozen_block": FrozenBlock,
}
"""Builders by name; ``frozen_mixed`` needs ``use_orig_params=True``."""


def wrap_blocks(*types: type[nn.Module]) -> ModuleWrapPolicy:
    """Policy that makes an FSDP unit of every module of ``types``; by default of every Block."""
    return ModuleWrapPolicy(set(types or (Block, _Layer)))


def wrap_linears() -> Callable[..., bool]:
    """Policy that makes an FSDP unit of every single layer with parameters of its own."""
    return functools.partial(
        lambda_auto_wrap_policy,
        lambda_fn=lambda module: next(module.parameters(recurse=False), None) is not None,
    )


_POLICIES: Mapping[str, Callable[[], Any]] = {
    "root": lambda: None,
    "blocks": wrap_blocks,
    "linears": wrap_linears,
}


def wrap_fsdp1(
    model: nn.Module,
    *,
    use_orig_params: bool = True,
    strategy: str | ShardingStrategy = "FULL_SHARD",
    policy: str | Callable[..., bool] | ModuleWrapPolicy | None = "blocks",
    process_group: Any = None,
    device_mesh: DeviceMesh | None = None,
    ignored_modules: Iterable[nn.Module] | None = None,
    ignored_states: Iterable[nn.Parameter] | None = None,
    mixed_precision: MixedPrecision | None = None,
    cpu_offload: bool = False,
) -> FSDP:
    """The model as an FSDP1 module on CPU.

    ``policy`` is ``"root"`` (one unit), ``"blocks"`` (nested units), ``"linears"`` (a unit for
    every layer) or a policy of FSDP's; ``strategy`` a ``ShardingStrategy`` or its name.
    """
    return FSDP(
        model,
        process_group=process_group,
        sharding_strategy=ShardingStrategy[strategy] if isinstance(strategy, str) else strategy,
        cpu_offload=CPUOffload(offload_params=True) if cpu_offload else None,
        auto_wrap_policy=_POLICIES[policy]() if isinstance(policy, str) else policy,
        mixed_precision=mixed_precision,
        ignored_modules=ignored_modules,
        ignored_states=None if ignored_states is None else list(ignored_states),
        device_id=torch.device("cpu"),
        use_orig_params=use_orig_params,
        device_mesh=device_mesh,
    )


def wrap_fsdp1_inside(model: nn.Module, **options: Any) -> nn.Module:
    """FSDP1 around each block alone: the root and what lies beside the blocks stay outside it.

    As with FSDP in earnest, nobody averages the gradients of the parameters outside: ranks that
    see different data disagree on them.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, (Block, _Layer)):
                setattr(parent, name, wrap_fsdp1(child, policy=None, **options))
    return model


def inner(model: nn.Module) -> Any:
    """The model that FSDP, DDP and ``torch.compile`` wrap at the root."""
    for name in ("_orig_mod", "_fsdp_wrapped_module", "module"):
        while (wrapped := model._modules.get(name)) is not None:
            model = wrapped
    return model


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), **{"lr": 0.01, **options})


def two_groups(model: nn.Module, **options: Any) -> list[dict[str, Any]]:
    """Parameter groups: names with ``bias`` or ``norm`` get no weight decay, the rest gets 0.1.

    Only for models that keep their parameter names: ``use_orig_params=True``, FSDP2, DDP, plain.
    """
    groups: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for name, parameter in model.named_parameters():
        groups["bias" in name or "norm" in name].append(parameter)
    decay, no_decay = groups
    return [
        {"params": decay, "weight_decay": 0.1, **options},
        {"params": no_decay, "weight_decay": 0.0, **options},
    ]


def train_steps(
    model: nn.Module,
    optim: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
    steps: int = 2,
    *,
    seed: int = 0,
    first: int = 0,
    set_to_none: bool = True,
) -> list[float]:
    """Train on steps ``first`` to ``first + steps``; returns this rank's losses.

    The data is a function of (``seed``, step, rank) alone; the global random state is left as it
    was.  Gradients are cleared after every step.
    """
    train_fsdp2_on_cpu(model)
    optimizers = [optim] if isinstance(optim, torch.optim.Optimizer) else list(optim)
    rank = dist.get_rank() if dist.is_initialized() else 0
    losses = []
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed((seed * 10_007 + step) * 1_009 + rank)
        output = model(inner(model).batch(generator))
        loss = output.float().pow(2).mean() + output.float().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)
        losses.append(loss.item())
    return losses


def full_state(model: FSDP, optim: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer state as whole tensors under FQNs, on every rank: stock FSDP's own gather.

    What our planners save and load is compared with this.  A copy: where nothing is sharded, FSDP
    itself returns the optimizer's own tensors.
    """
    with FSDP.state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(offload_to_cpu=False, rank0_only=False),
        FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=False),
    ):
        return copy.deepcopy(FSDP.optim_state_dict(model, optim))
