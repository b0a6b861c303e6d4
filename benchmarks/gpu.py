"""From an accelerator's memory to disk and back, against a pinned copy and raw IO.

    python -m benchmarks.gpu [--mib 4096] [--folder /fast/disk] [--rounds 3] [--json out.json]

One process, AdamW's state of one large plain model on the accelerator (on the CPU where there is
none, to try the program).  Everything runs in one go, warmed up, variants in turn; figures are
medians.  ``stock`` is ``dcp.save`` and ``dcp.load`` with ``FileSystemWriter`` and
``FileSystemReader``; ``pinned copy`` copies the state to and from pinned memory that is there;
``raw IO`` writes and reads the same bytes from and into the CPU's memory, one file.  After each
load the state is compared with what was saved.

``stall`` is what an asynchronous save takes before it returns, with :class:`FlatStager`.
Columns: GB/s (1e9 bytes), and the ratio to the pinned copy and to raw IO.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from benchmarks.measure import interleave, median, raw_bytes, table, write_json
from dcp_fsdp_osd import (
    FlatModelState,
    FlatOptimLoadPlanner,
    FlatOptimSavePlanner,
    FlatOptimState,
    FlatStager,
    StreamingReader,
    StreamingWriter,
)

__all__ = ["main"]

_WIDTH = 4096
_RAW, _COPY = "raw IO", "pinned copy"


class _Bench:
    def __init__(self, folder: Path, mib: int) -> None:
        self.folder = folder
        found = (
            torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        )
        self.device = found or torch.device("cpu")
        layers = max(mib // (3 * _WIDTH * _WIDTH * 4 >> 20), 1)
        with torch.device(self.device):
            self.model = nn.Sequential(
                *(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(layers))
            )
        self.optim = torch.optim.AdamW(self.model.parameters())
        self.model(torch.ones(1, _WIDTH, device=self.device)).sum().backward()
        self.optim.step()
        self.optim.zero_grad()
        self.tensors = [p.detach() for p in self.model.parameters()]
        self.tensors += [s[n] for s in self.optim.state.values() for n in ("exp_avg", "exp_avg_sq")]
        self.saved = [tensor.clone() for tensor in self.tensors]
        pin = found is not None
        self.resident = [torch.zeros(t.shape, dtype=t.dtype, pin_memory=pin) for t in self.tensors]
        self.size = sum(tensor.nbytes for tensor in self.tensors)
        self.stager = FlatStager()

    def _sync(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def _state(self) -> dict[str, Any]:
        return {
            "model": FlatModelState(self.model),
            "optim": FlatOptimState(self.model, self.optim),
        }

    def _plain(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optim": self.optim.state_dict()["state"]}

    def _copy(self, *, down: bool) -> None:
        for tensor, resident in zip(self.tensors, self.resident, strict=True):
            target, source = (resident, tensor) if down else (tensor, resident)
            target.copy_(source, non_blocking=True)
        self._sync()

    def savers(self) -> dict[str, Callable[[], None]]:
        def raw() -> None:
            with (self.folder / "raw").open("wb", buffering=0) as file:
                for tensor in self.resident:
                    file.write(raw_bytes(tensor))
                os.fsync(file.fileno())

        def stock() -> None:
            writer = dcp.FileSystemWriter(self.folder / "stock")
            dcp.save(self._plain(), storage_writer=writer, no_dist=True)

        def ours() -> None:
            writer = StreamingWriter(self.folder / "ours", overwrite=True)
            planner = FlatOptimSavePlanner()
            dcp.save(self._state(), storage_writer=writer, planner=planner, no_dist=True)

        def stall() -> None:
            self.stager.stage(self._state())

        return {
            _COPY: lambda: self._copy(down=True),
            "stall": stall,
            _RAW: raw,
            "stock": stock,
            "ours": ours,
        }

    def loaders(self) -> dict[str, Callable[[], None]]:
        def raw() -> None:
            with (self.folder / "raw").open("rb", buffering=0) as file:
                for tensor in self.resident:
                    if file.readinto(raw_bytes(tensor)) != tensor.nbytes:
                        raise OSError("short read")

        def stock() -> None:
            reader = dcp.FileSystemReader(self.folder / "stock")
            dcp.load(self._plain(), storage_reader=reader, no_dist=True)

        def ours() -> None:
            reader = StreamingReader(self.folder / "ours")
            planner = FlatOptimLoadPlanner()
            dcp.load(self._state(), storage_reader=reader, planner=planner, no_dist=True)
            self._sync()

        return {_COPY: lambda: self._copy(down=False), _RAW: raw, "stock": stock, "ours": ours}

    def spoil(self, variant: str) -> None:
        with torch.no_grad():
            for tensor in self.tensors:
                tensor.fill_(7)
        self._sync()

    def check(self, variant: str) -> None:
        if variant != _RAW:
            for tensor, saved in zip(self.tensors, self.saved, strict=True):
                if not torch.equal(tensor, saved):
                    raise RuntimeError(f"{variant} loaded something else than what was saved")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mib", type=int, default=4096)
    parser.add_argument("--folder")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="gpu-", dir=args.folder))
    results: dict[str, Any] = {}
    try:
        bench = _Bench(folder, args.mib)
        name = torch.cuda.get_device_name() if bench.device.type == "cuda" else str(bench.device)
        print(f"{bench.size / 1e9:.2f} GB on {name}, torch {torch.__version__}\n")
        saved = interleave(bench.savers(), rounds=args.rounds)
        loaded = interleave(
            bench.loaders(), rounds=args.rounds, before=bench.spoil, after=bench.check
        )
        for what, runs in (("save", saved), ("load", loaded)):
            rates = {
                variant: bench.size / median(run.wall for run in of) / 1e9
                for variant, of in runs.items()
            }
            rows = [
                [f"{what}: {variant}", rate, rate / rates[_COPY], rate / rates[_RAW]]
                for variant, rate in rates.items()
            ]
            print(table(rows, header=["variant", "GB/s", "x pinned copy", "x raw IO"]), "\n")
            results[what] = runs
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    write_json(args.json, results)


if __name__ == "__main__":
    main()
