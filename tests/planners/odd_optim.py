"""An optimizer whose state is of every kind that there is."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Everything", "Owned"]


class Everything(torch.optim.Optimizer):
    """Keeps nested, odd, per-shard and non-tensor state; a real (if silly) optimizer.

    ``blocks`` adds one scale per four local elements: state that depends on how the parameter
    was cut, as a block-quantized optimizer has.
    """

    def __init__(self, params: Any, *, blocks: bool = False, float_step: bool = True) -> None:
        super().__init__(params, {"lr": 0.1, "betas": (0.5, [1, 2]), "callback": None})
        self.blocks = blocks
        self.float_step = float_step

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = 0 if self.float_step else torch.tensor(0.0)
                    state["half"] = torch.zeros_like(p, dtype=torch.bfloat16)
                    state["counts"] = torch.zeros_like(p, dtype=torch.int16)
                    state["nothing"] = None
                    state["name"] = "plain"
                    state["nested"] = {
                        "deep": {"sum": torch.zeros_like(p, dtype=torch.float64)},
                        "flag": True,
                    }
                    if self.blocks:
                        state["scales"] = torch.zeros(-(-p.numel() // 4))
                state["step"] += 1
                state["half"] += p.grad
                state["counts"] += (p.grad > 0).to(torch.int16)
                state["nested"]["deep"]["sum"] += p.grad
                if self.blocks:
                    padded = torch.nn.functional.pad(p.grad.flatten(), (0, -p.numel() % 4))
                    state["scales"] += padded.view(-1, 4).abs().amax(1)
                p -= group["lr"] * state["half"].to(p.dtype)


class Owned(torch.optim.Optimizer):
    """Keeps whole, unsharded state of a parameter that is cut, on the rank of its first element.

    As heavyball's optimizers do under FSDP1. ``shapes`` are the parameters' before wrapping.
    """

    def __init__(self, params: Any, shapes: list[torch.Size], rank: int) -> None:
        super().__init__(params, {"lr": 0.1})
        self.shapes, self.rank = shapes, rank

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [p for group in self.param_groups for p in group["params"]]
        held = torch.tensor([p.numel() for p in params])
        sizes = [torch.empty_like(held) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(sizes, held)
        before = torch.stack(sizes)[: self.rank].sum(0)
        for number, (param, shape) in enumerate(zip(params, self.shapes, strict=True)):
            if param.numel() and not before[number]:
                state = self.state[param]
                state.setdefault("whole", torch.rand(shape))
                state.setdefault("side", torch.rand(shape.numel() + 1))
                state["step"] = state.get("step", 0) + 1
