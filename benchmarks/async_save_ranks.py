"""One rank of :mod:`benchmarks.async_save`; see :mod:`benchmarks.launch`."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from benchmarks.launch import report
from benchmarks.measure import interleave, median
from benchmarks.stock_vs_ours_ranks import Job as Size
from benchmarks.stock_vs_ours_ranks import Variant
from benchmarks.stock_vs_ours_whole import WholeBench
from dcp_fsdp_osd import FlatOptimSavePlanner, FlatStager

__all__ = ["Job"]

_IDLE_STEPS = 3


@dataclass(frozen=True)
class Job:
    """``size`` as for :mod:`benchmarks.stock_vs_ours`; ``kinds`` of AsyncCheckpointerType."""

    size: Size
    kinds: tuple[str, ...]


class _Bench(WholeBench):
    """Weights and AdamW, saved while the training goes on."""

    def __init__(self, job: Job) -> None:
        super().__init__(job.size)
        self.kinds = job.kinds
        self.group = dist.new_group(backend="gloo")
        self.stagers = {kind: FlatStager(shared_memory=kind == "process") for kind in job.kinds}
        self.resident = [torch.zeros_like(tensor) for tensor in self._tensors()]
        self.step = 0

    def variants(self) -> dict[str, Variant]:
        found: dict[str, Variant] = {"raw copy": self._raw}
        for kind in self.kinds:
            found[f"stock, {kind}"] = self._saving(self._stock, kind)
            found[f"ours, {kind}"] = self._saving(self._ours, kind)
        return found

    def _raw(self) -> dict[str, float]:
        start = time.perf_counter()
        for copy, tensor in zip(self.resident, self._tensors(), strict=True):
            copy.copy_(tensor)
        return {"stall": time.perf_counter() - start}

    def _stock(self, kind: str) -> Future[Any]:
        model, optim = get_state_dict(self.model, self.optim)
        writer = self._stock_writer(f"stock-{kind}")
        return self._begin({"model": model, "optim": optim}, kind, storage_writer=writer)

    def _ours(self, kind: str) -> Future[Any]:
        writer = self._ours_writer(f"ours-{kind}")
        return self._begin(
            self._state(),
            kind,
            storage_writer=writer,
            planner=FlatOptimSavePlanner(),
            async_stager=self.stagers[kind],
        )

    def _begin(self, state: dict[str, Any], kind: str, **options: Any) -> Future[Any]:
        future = dcp.async_save(
            state,
            process_group=self.group,
            async_checkpointer_type=AsyncCheckpointerType(kind),
            **options,
        )
        return future if isinstance(future, Future) else future.upload_completion

    def _saving(self, begin: Callable[[str], Future[Any]], kind: str) -> Variant:
        def run() -> dict[str, float]:
            idle = [self._train() for _ in range(_IDLE_STEPS)]
            dist.barrier()
            start = time.perf_counter()
            future = begin(kind)
            stall = time.perf_counter() - start
            busy = []
            while not self._all(future.done()):
                busy.append(self._train())
            future.result()
            done = time.perf_counter() - start
            slower = median(busy) / median(idle) if busy else 1.0
            return {"stall": stall, "background": done - stall, "slower": slower}

        return run

    def _train(self) -> float:
        self.step += 1
        tokens = torch.arange(16).view(2, 8) + self.rank + self.step
        start = time.perf_counter()
        self.model(tokens).square().mean().backward()
        self.optim.step()
        self.optim.zero_grad()
        return time.perf_counter() - start

    def _all(self, done: bool) -> bool:
        told = torch.tensor(int(done))
        dist.all_reduce(told, dist.ReduceOp.MIN)
        return bool(told)

    def run(self) -> dict[str, Any]:
        runs = interleave(
            self.variants(),
            rounds=self.job.rounds,
            barrier=dist.barrier,
            before=self.before_save,
        )
        return {
            "state_bytes": self.state_bytes,
            "runs": {name: [asdict(run) for run in of] for name, of in runs.items()},
        }


def _run(job: Job) -> dict[str, Any]:
    return _Bench(job).run()


if __name__ == "__main__":
    report(_run)
