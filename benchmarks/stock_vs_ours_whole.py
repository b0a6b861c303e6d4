"""``python -m benchmarks.stock_vs_ours --whole``: model and AdamW in one checkpoint.

Stock is ``get_state_dict`` and ``set_state_dict`` of
``torch.distributed.checkpoint.state_dict``, which PyTorch's own tutorial uses, with
``FileSystemWriter`` and ``FileSystemReader``; ours is :class:`FlatModelState` with our planners.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from benchmarks.stock_vs_ours_ranks import Bench, Variant
from dcp_fsdp_osd import (
    FlatModelState,
    FlatOptimLoadPlanner,
    FlatOptimSavePlanner,
    FlatOptimState,
    StreamingReader,
)

__all__ = ["WholeBench"]


class WholeBench(Bench):
    """Weights count as state: they are saved, spoiled before each load, and compared after it.

    Loads are into the weights' own memory; only the optimizer's state is allocated.
    """

    def _tensors(self) -> list[torch.Tensor]:
        return [*(p.detach() for p in self.model.parameters()), *super()._tensors()]

    def savers(self) -> dict[str, Variant]:
        def stock() -> dict[str, float]:
            start = time.perf_counter()
            model, optim = get_state_dict(self.model, self.optim)
            gathered = time.perf_counter()
            state = {"model": model, "optim": optim}
            dcp.save(state, storage_writer=self._stock_writer("stock"))
            return {"gather": gathered - start, "dcp": time.perf_counter() - gathered}

        def ours(writer: Callable[[str], Any], name: str) -> None:
            planner = FlatOptimSavePlanner(self.model, self.optim)
            dcp.save(self._state(), storage_writer=writer(name), planner=planner)

        return {
            "stock": stock,
            "ours": lambda: ours(self._ours_writer, "ours"),
            "ours, stock writer": lambda: ours(self._stock_writer, "ours-stock-writer"),
            "raw write": super().savers()["raw write"],
        }

    def _state(self) -> dict[str, Any]:
        optim = FlatOptimState(self.model, self.optim)
        return {"model": FlatModelState(self.model), "optim": optim}

    def loaders(self) -> dict[str, Variant]:
        def stock() -> dict[str, float]:
            start = time.perf_counter()
            model, optim = get_state_dict(self.model, self.optim)
            got = time.perf_counter()
            state = {"model": model, "optim": optim}
            dcp.load(state, storage_reader=dcp.FileSystemReader(self.folder / "stock"))
            read = time.perf_counter()
            set_state_dict(
                self.model,
                self.optim,
                model_state_dict=state["model"],
                optim_state_dict=state["optim"],
            )
            return {"get": got - start, "read": read - got, "set": time.perf_counter() - read}

        def ours(reader: Any) -> None:
            planner = FlatOptimLoadPlanner(self.model, self.optim)
            dcp.load(self._state(), storage_reader=reader, planner=planner)

        raw = super().loaders()
        return {
            "stock": stock,
            "ours": lambda: ours(StreamingReader(self.folder / "ours")),
            "ours, in place": lambda: ours(StreamingReader(self.folder / "ours")),
            "ours, stock reader": lambda: ours(dcp.FileSystemReader(self.folder / "ours")),
            "raw read": raw["raw read"],
            "raw read, fresh memory": raw["raw read, fresh memory"],
        }

    def before_load(self, variant: str) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(7)
        super().before_load(variant)

    def _fresh(self) -> list[torch.Tensor]:
        return [*(p.detach() for p in self.model.parameters()), *super()._fresh()]
