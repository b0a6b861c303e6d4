"""Boxes of short runs read from the local disk: ``python -m benchmarks.storage --only columns``."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from benchmarks.measure import median, table
from dcp_fsdp_osd.storage import StreamingReader, StreamingWriter
from tests.storage.states import BoxPlanner

__all__ = ["columns"]

_Boxes = list[tuple[tuple[int, ...], tuple[int, ...]]]
_CASES: dict[str, tuple[tuple[int, ...], _Boxes]] = {
    "1M x 4 by columns": ((1_000_000, 4), [((0, i), (1_000_000, 1)) for i in range(4)]),
    "inner box of 64 x 500 x 500": ((64, 500, 500), [((1, 10, 10), (62, 480, 480))]),
    "an element of each row of 64 x 500 x 500": ((64, 500, 500), [((0, 0, 250), (64, 500, 1))]),
    "an element of each row of 256 x 64K": ((256, 65_536), [((0, 9), (256, 1))]),
}


def columns(folder: str | None, rounds: int) -> list[dict[str, Any]]:
    """Print and return seconds of ours, in at most 8 MiB of buffers, and of stock's reader."""
    found = []
    with tempfile.TemporaryDirectory(prefix="columns-", dir=folder) as root:
        for number, (name, (shape, boxes)) in enumerate(_CASES.items()):
            path = Path(root) / str(number)
            dcp.save({"w": torch.rand(shape)}, storage_writer=StreamingWriter(path))
            times: dict[str, list[float]] = {"ours": [], "stock": []}
            for _ in range(rounds + 1):
                for kind, seconds in times.items():
                    reader = (
                        StreamingReader(path, max_inflight_bytes=8 << 20)
                        if kind == "ours"
                        else dcp.FileSystemReader(path)
                    )
                    begin = time.perf_counter()
                    dcp.load({}, storage_reader=reader, planner=BoxPlanner("w", boxes))
                    seconds.append(time.perf_counter() - begin)
            ours, stock = (median(seconds[1:]) for seconds in times.values())
            found.append({"kind": "columns", "case": name, "ours": ours, "stock": stock})
    rows = [
        (each["case"], f"{each['ours']:.3f}", f"{each['stock']:.3f}", each["stock"] / each["ours"])
        for each in found
    ]
    print(table(rows, header=("boxes", "ours s", "stock s", "x stock")), flush=True)
    return found
