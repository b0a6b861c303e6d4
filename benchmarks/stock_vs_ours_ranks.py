"""One rank of :mod:`benchmarks.stock_vs_ours`: the model, the variants, and their measurement.

Started by it as ``python -m benchmarks.stock_vs_ours_ranks FOLDER RANK WORLD``, once per rank;
reads its job from FOLDER/job and leaves FOLDER/result-<rank>.json.
"""

from __future__ import annotations

import os
import shutil
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import (
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from benchmarks.heap import release_freed_memory
from benchmarks.launch import report
from benchmarks.measure import Measured, interleave, raw_bytes, read_as_reader
from benchmarks.nothing import NoLoadPlanner, NoPlanner, NoReader, NoWriter
from benchmarks.wire import WireBytes
from dcp_fsdp_osd import (
    FlatOptimLoadPlanner,
    FlatOptimSavePlanner,
    StreamingReader,
    StreamingWriter,
)
from dcp_fsdp_osd.storage.checksum import best_checksum

__all__ = ["FRESH", "Bench", "Job", "Variant"]

FRESH = ("stock", "stock A", "stock B", "ours", "ours, stock reader", "raw read, fresh memory")
"""Load variants that start from an optimizer with no state, and so allocate all of it."""

Variant = Callable[[], Mapping[str, Any] | None]


@dataclass(frozen=True)
class Job:
    """What a world of ranks is to measure.  ``width`` and ``layers`` set the model's size."""

    folder: str
    use_orig_params: bool
    width: int
    layers: int
    rounds: int
    fsync: bool
    whole: bool = False


class _Layer(nn.Module):
    """The matrices of a transformer layer; what it computes does not matter here."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.out(q * k + v)
        return x + self.down(torch.relu(self.up(x)))


class _Model(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(8 * width, width)
        self.layers = nn.ModuleList(_Layer(width) for _ in range(layers))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return x


def _hash(data: memoryview) -> int:
    return best_checksum().raw(data, 0)


class Bench:
    """The optimizer's state alone; :mod:`benchmarks.stock_vs_ours_whole` has all of a training."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.rank, self.folder = dist.get_rank(), Path(job.folder)
        torch.manual_seed(0)
        self.model = FSDP(
            _Model(job.width, job.layers),
            auto_wrap_policy=ModuleWrapPolicy({_Layer}),
            use_orig_params=job.use_orig_params,
            device_id=torch.device("cpu"),
        )
        self.optim = self._new_optim()
        tokens = torch.arange(16).view(2, 8) + self.rank
        self.model(tokens).square().mean().backward()
        self.optim.step()
        self.optim.zero_grad()
        self.trained = self._digests()
        self.spec = [
            {name: (value.shape, value.dtype) for name, value in self.optim.state[p].items()}
            for p in self.model.parameters()
        ]
        self.state_bytes = sum(value.nbytes for value in self._tensors())
        self.optim_bytes = sum(value.nbytes for value in Bench._tensors(self))

    # ------------------------------------------------------------------ the optimizer's state

    def _new_optim(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def _tensors(self) -> list[torch.Tensor]:
        states = (self.optim.state[p] for p in self.model.parameters() if p in self.optim.state)
        return [value for state in states for _, value in sorted(state.items())]

    def _digests(self) -> list[int]:
        return [zlib.crc32(raw_bytes(value)) for value in self._tensors()]

    def _live_state(self) -> None:
        """A new optimizer whose state is there, in resident memory, with wrong values."""
        self.optim = self._new_optim()
        for parameter, state in zip(self.model.parameters(), self.spec, strict=True):
            if state:
                self.optim.state[parameter] = {
                    name: torch.full(shape, 7, dtype=dtype)
                    for name, (shape, dtype) in state.items()
                }

    # ------------------------------------------------------------------ save

    def _stock_writer(self, name: str) -> Any:
        return dcp.FileSystemWriter(self.folder / name, sync_files=self.job.fsync)

    def _ours_writer(self, name: str) -> Any:
        return StreamingWriter(self.folder / name, overwrite=True, fsync=self.job.fsync)

    def savers(self) -> dict[str, Variant]:
        def stock() -> dict[str, float]:
            start = time.perf_counter()
            with self._sharded():
                state = FSDP.optim_state_dict(self.model, self.optim)
            gathered = time.perf_counter()
            dcp.save({"optim": state}, storage_writer=self._stock_writer("stock"))
            return {"gather": gathered - start, "dcp": time.perf_counter() - gathered}

        def ours(writer: Callable[[str], Any], name: str) -> None:
            planner = FlatOptimSavePlanner(self.model, self.optim)
            state = {"optim": self.optim.state_dict()}
            dcp.save(state, storage_writer=writer(name), planner=planner)

        def nothing() -> None:
            dcp.save({}, storage_writer=NoWriter(), planner=NoPlanner())

        def raw(seen: Callable[[memoryview], object] | None = None) -> None:
            with (self.folder / f"raw-{self.rank}").open("wb", buffering=0) as file:
                for tensor in self._tensors():
                    view = raw_bytes(tensor)
                    for begin in range(0, len(view), 1 << 20) if seen else ():
                        seen(view[begin : begin + (1 << 20)])
                    file.write(view)
                if self.job.fsync:
                    os.fsync(file.fileno())

        return {
            "stock": stock,
            "ours": lambda: ours(self._ours_writer, "ours"),
            "ours, stock writer": lambda: ours(self._stock_writer, "ours-stock-writer"),
            "raw write": raw,
            "raw write, checksums": lambda: raw(_hash),
            "nothing": nothing,
        }

    def before_save(self, variant: str) -> None:
        release_freed_memory()
        dist.barrier()
        if self.rank == 0:
            for path in self.folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            os.sync()  # else one variant waits for what another left to be written back
        dist.barrier()

    # ------------------------------------------------------------------ load

    def _sharded(self) -> Any:
        return FSDP.state_dict_type(
            self.model,
            StateDictType.SHARDED_STATE_DICT,
            ShardedStateDictConfig(),
            ShardedOptimStateDictConfig(),
        )

    def loaders(self) -> dict[str, Variant]:
        with self._sharded():
            model_state = self.model.state_dict()  # stock A wants it; not part of its time

        def stock_a() -> dict[str, float]:
            start = time.perf_counter()
            reader = dcp.FileSystemReader(self.folder / "stock")
            loaded = load_sharded_optimizer_state_dict(model_state, "optim", reader)
            read = time.perf_counter()
            with self._sharded():
                flat = FSDP.optim_state_dict_to_load(self.model, self.optim, loaded["optim"])
            self.optim.load_state_dict(flat)
            return {"read": read - start, "gather": time.perf_counter() - read}

        def stock_b() -> dict[str, float]:
            start = time.perf_counter()
            state = {"optim": get_optimizer_state_dict(self.model, self.optim)}
            got = time.perf_counter()
            dcp.load(state, storage_reader=dcp.FileSystemReader(self.folder / "stock"))
            read = time.perf_counter()
            set_optimizer_state_dict(self.model, self.optim, state["optim"])
            return {"get": got - start, "read": read - got, "set": time.perf_counter() - read}

        def ours(reader: Any, live: bool = False) -> None:
            state = {"optim": self.optim.state_dict() if live else {}}
            planner = FlatOptimLoadPlanner(self.model, self.optim)
            dcp.load(state, storage_reader=reader, planner=planner)
            self.optim.load_state_dict(state["optim"])

        def raw_fresh() -> None:
            self.scratch = self._fresh()
            self._read_raw(self.scratch)

        return {
            "stock A": stock_a,
            "stock B": stock_b,
            "ours": lambda: ours(StreamingReader(self.folder / "ours")),
            "ours, in place": lambda: ours(StreamingReader(self.folder / "ours"), live=True),
            "ours, stock reader": lambda: ours(dcp.FileSystemReader(self.folder / "ours")),
            "raw read": lambda: self._read_raw(self._tensors()),
            "raw read, fresh memory": raw_fresh,
            "raw read, as the reader": lambda: self._read_raw(self._tensors(), as_reader=True),
            "nothing": lambda: dcp.load({}, storage_reader=NoReader(), planner=NoLoadPlanner()),
        }

    def _fresh(self) -> list[torch.Tensor]:
        """What a raw read goes to where state has to be allocated."""
        shapes = [value for state in self.spec for value in state.values()]
        return [torch.empty(shape, dtype=dtype) for shape, dtype in shapes]

    def _read_raw(self, tensors: list[torch.Tensor], *, as_reader: bool = False) -> None:
        with (self.folder / f"raw-{self.rank}").open("rb", buffering=0) as file:
            for tensor in tensors:
                if as_reader:
                    read_as_reader(file, raw_bytes(tensor), _hash)
                elif file.readinto(raw_bytes(tensor)) != tensor.nbytes:
                    raise OSError("short read")

    def prepare_load(self) -> None:
        """Leave the checkpoints that the loaders read: stock's, ours, and raw."""
        self.before_save("")
        savers = self.savers()
        for name in ("stock", "ours", "raw write"):
            savers[name]()
        if self._digests() != self.trained:
            raise RuntimeError("saving changed the optimizer's state")

    def before_load(self, variant: str) -> None:
        self.scratch: list[torch.Tensor] = []
        self.optim = self._new_optim()
        if variant in ("ours, in place", "raw read", "raw read, as the reader"):
            self._live_state()
        release_freed_memory()
        dist.barrier()

    def after_load(self, variant: str) -> None:
        dist.barrier()
        if not variant.startswith(("raw", "nothing")) and self._digests() != self.trained:
            raise RuntimeError(f"{variant} loaded something else than what was saved")

    # ------------------------------------------------------------------ all of it

    def run(self) -> dict[str, Any]:
        savers = self.savers()
        saved = self._measure(savers, self.before_save, None)
        self.prepare_load()
        loaders = self.loaders()
        loaded = self._measure(loaders, self.before_load, self.after_load)
        return {
            "state_bytes": self.state_bytes,
            "optim_bytes": self.optim_bytes,
            "save": saved,
            "load": loaded,
            "fresh": [name for name in loaders if name in FRESH],
        }

    def _measure(
        self,
        variants: Mapping[str, Variant],
        before: Callable[[str], None],
        after: Callable[[str], None] | None,
    ) -> dict[str, Any]:
        """Times first; then every variant once more to count what crosses between ranks."""
        runs: dict[str, list[Measured]] = interleave(
            variants,
            rounds=self.job.rounds,
            barrier=dist.barrier,
            before=before,
            after=after,
        )
        results = {}
        for name, variant in variants.items():
            before(name)
            with WireBytes() as wire:
                variant()
            if after is not None:
                after(name)
            results[name] = {
                "runs": [asdict(run) for run in runs[name]],
                "tensor_bytes_sent": wire.tensors,
                "object_bytes_sent": wire.objects,
            }
        return results


def _run(job: Job) -> dict[str, Any]:
    from benchmarks.stock_vs_ours_whole import WholeBench

    return (WholeBench if job.whole else Bench)(job).run()


if __name__ == "__main__":
    report(_run)
