"""What the planner tests share: making optimizers, saving, loading, comparing bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.tensor import DTensor

from dcp_fsdp_osd import FlatOptimLoadPlanner, FlatOptimSavePlanner
from tests.models import MODELS, train_steps, wrap_fsdp1

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "amsgrad": lambda params: torch.optim.AdamW(params, lr=0.01, amsgrad=True),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.01),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, nesterov=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.9, centered=True),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "tensor_lr": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.01)),
}


def make(
    model: str = "mlp", optim: str = "adamw", *, steps: int = 2, **wrapping: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """An FSDP1 model and its optimizer after ``steps`` steps."""
    wrapped = wrap_fsdp1(MODELS[model](), **wrapping)
    optimizer = OPTIMIZERS[optim](wrapped.parameters())
    train_steps(wrapped, optimizer, steps)
    return wrapped, optimizer


def save(model: nn.Module, optim: Any, path: str | Path, **options: Any) -> Any:
    """``dcp.save`` with our planner and the stock writer."""
    group = options.pop("process_group", None)
    state = {"optim": optim.state_dict()}
    planner = FlatOptimSavePlanner(model, optim, **options)
    return dcp.save(
        state, storage_writer=FileSystemWriter(path), planner=planner, process_group=group
    )


def load(
    model: nn.Module,
    optim: Any,
    path: str | Path,
    *,
    into: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """``dcp.load`` with our planner and the stock reader; returns the optimizer's state dict."""
    group = options.pop("process_group", None)
    state: dict[str, Any] = {"optim": {} if into is None else into}
    planner = FlatOptimLoadPlanner(model, optim, **options)
    dcp.load(state, storage_reader=FileSystemReader(path), planner=planner, process_group=group)
    return state["optim"]


def differences(left: Any, right: Any, path: str = "") -> list[str]:
    """Where two nested values differ, tensors compared bit for bit with dtype and device."""
    if isinstance(left, DTensor) and isinstance(right, DTensor):
        return differences(left.to_local(), right.to_local(), path)
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        same = (
            left.dtype == right.dtype
            and left.shape == right.shape
            and left.device == right.device
            and raw(left) == raw(right)
        )
        return [] if same else [f"{path}: {left} != {right}"]
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        found = [f"{path}.{k}: only in one" for k in left.keys() ^ right.keys()]
        for key in left.keys() & right.keys():
            found += differences(left[key], right[key], f"{path}.{key}")
        return found
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        if len(left) != len(right):
            return [f"{path}: {left} != {right}"]
        return [
            d
            for i, pair in enumerate(zip(left, right, strict=True))
            for d in differences(*pair, f"{path}[{i}]")
        ]
    return [] if type(left) is type(right) and left == right else [f"{path}: {left!r} != {right!r}"]


def raw(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def assert_same(left: Any, right: Any) -> None:
    found = differences(left, right)
    assert not found, "\n".join(found[:20])
