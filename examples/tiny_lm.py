"""What the demo trains: a small decoder-only transformer on the Python standard library's sources.

The text is what each machine has; tokens are bytes.  A batch is a function of the step alone and
cut by rank, so a resumed run goes on with the data it would have seen, at any world size.
"""

from __future__ import annotations

import math
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

__all__ = ["Config", "Text", "Trainer"]


@dataclass(frozen=True)
class Config:
    """``rows`` is the GLOBAL batch: each of W ranks takes ``rows / W`` of them."""

    width: int = 256
    heads: int = 4
    layers: int = 4
    context: int = 96
    rows: int = 8
    steps: int = 24
    save_at: int = 12
    lr: float = 2e-3


class Text:
    """The standard library's top-level modules, one after the other, as bytes."""

    def __init__(self, limit: int = 4 << 20) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        data = b"".join(path.read_bytes() for path in files)[:limit]
        if len(data) < 1 << 16:
            raise RuntimeError("the Python standard library's sources are not on this machine")
        self.files = len(files)
        self.bytes = torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def batch(self, step: int, config: Config) -> torch.Tensor:
        """Rows of ``context + 1`` tokens for all ranks together; the same wherever it is called."""
        random = torch.Generator().manual_seed(1_000_003 + step)
        span = config.context + 1
        starts = torch.randint(len(self.bytes) - span, (config.rows, 1), generator=random)
        return self.bytes[starts + torch.arange(span)].long()


class Layer(nn.Module):
    """Attention and feed-forward, each with a norm before it; one FSDP unit."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.feed_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        q, k, v = (
            part.view(rows, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.feed_norm(x))))


class Decoder(nn.Module):
    """Byte-level language model."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.layers = nn.ModuleList(Layer(config.width, config.heads) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, 256, bias=False)
        for table in (self.embed, self.position):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Trainer:
    """Model, AdamW with two groups (weight decay or none), and a schedule of the learning rate.

    ``kind`` is ``"fsdp1"`` or ``"fsdp2"``.  One ``seed`` gives the same weights in every world.
    """

    def __init__(self, config: Config, text: Text, kind: str, seed: int) -> None:
        self.config, self.text = config, text
        torch.manual_seed(seed)
        model = Decoder(config)
        self.model: nn.Module
        if kind == "fsdp1":
            self.model = FSDP(
                model,
                auto_wrap_policy=ModuleWrapPolicy({Layer}),
                use_orig_params=True,
                device_id=torch.device("cpu"),
            )
        else:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for layer in model.layers:
                fully_shard(layer, mesh=mesh)
            self.model = fully_shard(model, mesh=mesh)
        self.optim = self.new_optim()
        self.scheduler = LambdaLR(self.optim, self._rate)
        self.step = 0

    def new_optim(self) -> torch.optim.AdamW:
        """An optimizer without state."""
        plain: list[nn.Parameter] = []
        decayed: list[nn.Parameter] = []
        for name, parameter in self.model.named_parameters():
            kept = "norm" in name or name.endswith("bias")
            (plain if kept else decayed).append(parameter)
        groups = [
            {"params": decayed, "weight_decay": 0.1},
            {"params": plain, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=self.config.lr)

    def _rate(self, step: int) -> float:
        warmup = max(1, self.config.steps // 6)
        if step < warmup:
            return (step + 1) / warmup
        done = (step - warmup) / max(1, self.config.steps - warmup)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * done))

    def train(self, until: int) -> list[float]:
        """Train up to step ``until``; the loss of each step's global batch, alike on all ranks."""
        rank, world = dist.get_rank(), dist.get_world_size()
        losses = []
        while self.step < until:
            mine = self.text.batch(self.step, self.config).chunk(world)[rank]
            logits = self.model(mine[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), mine[:, 1:].flatten())
            loss.backward()
            self.optim.step()
            self.optim.zero_grad()
            self.scheduler.step()
            self.step += 1
            mean = loss.detach().double() / world
            dist.all_reduce(mean)
            losses.append(mean.item())
        return losses
