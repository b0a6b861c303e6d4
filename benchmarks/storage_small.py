"""Many small entries on the local disk: ``python -m benchmarks.storage --only small``."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from benchmarks.measure import median, table
from dcp_fsdp_osd.storage import StreamingReader, StreamingWriter

__all__ = ["small_entries"]

_COUNT = 20_000
_KINDS: dict[str, Callable[[int], Any]] = {
    "scalar tensors": lambda number: torch.tensor(float(number)),
    "Python numbers": lambda number: number,
}


def small_entries(folder: str | None, rounds: int) -> list[dict[str, Any]]:
    """Print and return seconds of ours and of stock's, both under DCP's own planners."""
    found = []
    with tempfile.TemporaryDirectory(prefix="small-", dir=folder) as root:
        for name, make in _KINDS.items():
            state = {"s": {f"layers.{number}.step": make(number) for number in range(_COUNT)}}
            times: dict[str, list[float]] = {}
            for turn in range(rounds + 1):
                for kind in ("ours", "stock"):
                    path = Path(root) / f"{name}-{kind}-{turn}"
                    writer = StreamingWriter(path) if kind == "ours" else FileSystemWriter(path)
                    reader = StreamingReader(path) if kind == "ours" else FileSystemReader(path)
                    begin = time.perf_counter()
                    dcp.save(dict(state), storage_writer=writer, no_dist=True)
                    saved = time.perf_counter()
                    dcp.load(dict(state), storage_reader=reader, no_dist=True)
                    times.setdefault(f"save {kind}", []).append(saved - begin)
                    times.setdefault(f"load {kind}", []).append(time.perf_counter() - saved)
            for way in ("save", "load"):
                ours, stock = (median(times[f"{way} {kind}"][1:]) for kind in ("ours", "stock"))
                case = f"{way} of {_COUNT:,} {name}"
                found.append({"kind": "small entries", "case": case, "ours": ours, "stock": stock})
    rows = [
        (each["case"], f"{each['ours']:.2f}", f"{each['stock']:.2f}", each["stock"] / each["ours"])
        for each in found
    ]
    print(table(rows, header=("small entries", "ours s", "stock s", "x stock")), flush=True)
    return found
