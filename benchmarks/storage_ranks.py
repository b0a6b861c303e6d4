"""One rank of ``benchmarks.storage``: runs phases in lockstep with the others and reports."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.launch import report
from benchmarks.measure import Measured, interleave
from benchmarks.s3_server import EmbeddedS3
from benchmarks.storage_variants import (
    Place,
    State,
    loaders,
    local_bytes,
    prepare,
    raw_prepare,
    savers,
)

__all__ = ["Job", "Phase", "make_state", "state_bytes"]

ROW = 2048  # elements
_MIB_ROWS = (1 << 20) // (4 * ROW)


@dataclass(frozen=True)
class Phase:
    """What the ranks do together: ``kind`` is "save", "load" or "prepare".

    ``source`` is the world size that wrote what is loaded.  ``latency`` is set on the embedded
    server before the phase; it must be 0 elsewhere.
    """

    kind: str
    place: Place
    latency: float = 0.0
    source: int = 0


@dataclass(frozen=True)
class Job:
    """All that one set of ranks does."""

    phases: list[Phase]
    mib: int
    rounds: int


def _shapes(mib: int) -> dict[str, tuple[int, ...]]:
    """Half of the bytes in large matrices and half in middling ones; 64 biases and 64 scalars."""
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(2):
        shapes[f"large.{i}"] = (mib // 4 * _MIB_ROWS, ROW)
    for i in range(8):
        shapes[f"layers.{i}.weight"] = (mib // 16 * _MIB_ROWS, ROW)
    for i in range(64):
        shapes[f"layers.{i}.bias"] = (ROW,)
        shapes[f"layers.{i}.step"] = ()
    return shapes


def state_bytes(mib: int) -> int:
    return sum(4 * torch.Size(shape).numel() for shape in _shapes(mib).values())


def make_state(mib: int, mesh: DeviceMesh) -> State:
    """Rows spread over the ranks as FSDP2 does; the same global values at every world size."""
    state: State = {}
    rank, world = mesh.get_local_rank(), mesh.size()
    for number, (name, shape) in enumerate(_shapes(mib).items()):
        if not shape:
            state[name] = torch.tensor(float(number))
            continue
        rows = shape[0] // world
        whole = shape[0] * (shape[1] if len(shape) == 2 else 1)
        start, count = whole // shape[0] * rows * rank, whole // shape[0] * rows
        local = torch.arange(start, start + count, dtype=torch.int32).mul_(number * 2 + 1)
        local = local.view(torch.float32).view(rows, *shape[1:])
        state[name] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    return state


def _bits(value: Any) -> torch.Tensor:
    tensor = value.to_local() if isinstance(value, DTensor) else value
    return tensor.reshape(-1).view(torch.int32)


class _Runner:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.first = dist.get_rank() == 0
        self.state = make_state(job.mib, self.mesh)
        self.expected = {name: _bits(value).clone() for name, value in self.state.items()}
        self.needed = local_bytes(self.state)

    def run(self, phase: Phase) -> dict[str, list[Measured]]:
        self.phase, self.place = phase, phase.place
        self.server = None
        if isinstance(phase.place.endpoint, EmbeddedS3):
            self.server = phase.place.endpoint
            if self.first:
                self.server.configure(latency=phase.latency)
        dist.barrier()
        if phase.kind == "prepare":
            prepare(self.place, self.state, f"source-{dist.get_world_size()}")
            return {}
        make = savers if phase.kind == "save" else loaders
        if phase.kind == "load":
            raw_prepare(self.place, self.state)
        variants = make(self.place)
        name = "saved" if phase.kind == "save" else f"source-{phase.source}"
        calls = {
            key: lambda variant=variant: self._counted(lambda: variant(self.state, name))
            for key, variant in variants.items()
        }
        return interleave(
            calls,
            rounds=self.job.rounds,
            barrier=dist.barrier,
            before=self._before,
            after=self._after,
        )

    def _counted(self, call: Any) -> dict[str, Any]:
        before = _syscall_bytes()
        call()
        return {"syscall_read": _syscall_bytes() - before}

    def _before(self, variant: str) -> None:
        if self.phase.kind == "save":
            if self.first:
                self.place.remove("saved")
                if self.place.endpoint is None:
                    os.sync()  # else one variant waits for what another left to be written back
        else:
            for value in self.state.values():
                _bits(value).zero_()
        dist.barrier()
        if self.first and self.server is not None:
            self.server.reset_stats()

    def _after(self, variant: str) -> None:
        dist.barrier()
        self.counts: dict[str, int] = {}
        if self.first and self.server is not None:
            self.counts = self.server.stats()
            self.history.setdefault(variant, []).append(self.counts)
        if self.phase.kind == "load":
            for name, expected in self.expected.items():
                small = variant.startswith("raw") and expected.numel() < 1 << 18
                if not small and not torch.equal(_bits(self.state[name]), expected):
                    raise RuntimeError(f"{variant} loaded {name} wrong")
                _bits(self.state[name]).copy_(expected)

    history: dict[str, list[dict[str, int]]]

    def phases(self) -> list[dict[str, Any]]:
        results = []
        for phase in self.job.phases:
            self.history = {}
            start = time.monotonic()
            runs = self.run(phase)
            results.append(
                {
                    "runs": {k: [asdict(m) for m in v] for k, v in runs.items()},
                    "server": self.history,
                    "needed": self.needed,
                }
            )
            if self.first:
                took = time.monotonic() - start
                print(f"  {phase.kind} {phase.place.label} took {took:.0f} s", file=sys.stderr)
        return results


def _syscall_bytes() -> int:
    """Bytes that this process got from ``read`` system calls so far."""
    line = Path("/proc/self/io").read_text().splitlines()[0]
    return int(line.partition(":")[2])


if __name__ == "__main__":
    report(lambda job: _Runner(job).phases())
