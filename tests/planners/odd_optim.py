"""An optimizer whose state is of every kind that there is."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Everything"]


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
