"""A local path that is a network file system: ``python -m benchmarks.latency``.

Each request waits (5 ms by default), then moves at the pace of one stream (1 GB/s), and all of a
rank's streams share a line (6 GB/s).  The store sleeps for it and moves no byte, so that what is
compared is how many requests are under way at a time: as the user says, or as ours finds out.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from benchmarks.measure import table, write_json
from dcp_fsdp_osd import StreamingReader, StreamingWriter
from dcp_fsdp_osd.storage.local_store import LocalStore
from dcp_fsdp_osd.storage.store import Seen, StoreConfig

__all__ = ["LatencyStore", "Line", "latency_store", "main"]

SETTINGS = (1, 2, 4, 8, 16, 32)


@dataclass
class Line:
    """What requests wait for.  Thread-safe.

    Attributes:
        latency: seconds of each request.
        stream, total: bytes a second, of one request and of all.
        moves: whether bytes are moved as well.
        most: requests that were under way at one time, at most.
    """

    latency: float
    stream: float = float("inf")
    total: float = float("inf")
    moves: bool = True
    most: int = 0
    _now: int = 0
    _free: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def open(self, config: StoreConfig) -> LatencyStore:
        """The `backend` of a reader or writer."""
        return LatencyStore(config, self)

    @contextmanager
    def request(self, nbytes: int) -> Iterator[None]:
        """Take as long as a request for `nbytes` does."""
        begin = time.monotonic()
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
            # It has its share of the line after those that came before it.
            self._free = max(self._free, begin + self.latency) + nbytes / self.total
            end = max(self._free, begin + self.latency + nbytes / self.stream)
        try:
            yield
            time.sleep(max(end - time.monotonic(), 0.0))
        finally:
            with self._lock:
                self._now -= 1


class LatencyStore(LocalStore):
    """A folder whose data take the time of a :class:`Line`; all else is the folder's own."""

    def __init__(self, config: StoreConfig, line: Line) -> None:
        super().__init__(config)
        self._line = line

    def read_into(
        self, name: str, offset: int, pieces: Sequence[memoryview], seen: Seen | None = None
    ) -> None:
        with self._line.request(sum(map(len, pieces))):
            if self._line.moves:
                super().read_into(name, offset, pieces, seen)

    def create(self, name: str, part_size: int, parallel: int) -> Any:
        return _LatencyUpload(super().create(name, part_size, parallel), self._line)


class _LatencyUpload:
    def __init__(self, upload: Any, line: Line) -> None:
        self._upload, self._line = upload, line

    def write(self, offset: int, pieces: Sequence[memoryview]) -> None:
        with self._line.request(sum(map(len, pieces))):
            if self._line.moves:
                self._upload.write(offset, pieces)

    def complete(self, size: int) -> None:
        if not self._line.moves:  # the size is checked before a commit
            self._upload.write(size - 1, [memoryview(b"\0")])
        self._upload.complete(size)

    def abort(self) -> None:
        self._upload.abort()


def latency_store(latency: float, **options: Any) -> Line:
    """A line; its ``open`` is a backend."""
    return Line(latency, **options)


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def measure(
    folder: Path, state: dict[str, torch.Tensor], line: Line | None, said: int | None, turn: int
) -> dict[str, float]:
    """Bytes a second of a save and of a load; with no line those of the folder."""
    path = folder / f"{'disk' if line is None else 'line'}-{said}-{turn}"
    backend = "auto" if line is None else replace(line).open
    nbytes = sum(each.nbytes for each in state.values())
    options: dict[str, Any] = {"backend": backend, "concurrency": said}
    writer = StreamingWriter(path, fsync=False, checksum=line is None, **options)
    found = {}
    seconds = _seconds(lambda: dcp.save(state, storage_writer=writer, no_dist=True))
    found["save"] = nbytes / seconds
    reader = StreamingReader(path, verify=line is None, **options)
    seconds = _seconds(lambda: dcp.load(state, storage_reader=reader, no_dist=True))
    found["load"] = nbytes / seconds
    for each in path.glob("*"):
        each.unlink()
    return found


def run(
    *, mib: int, latency: float, stream: float, total: float, rounds: int, settings: Sequence[int]
) -> list[dict[str, Any]]:
    """Rows of the table: each setting, and ours, on the line and on the folder itself."""
    state = {f"w{n}": torch.zeros(16 << 18) for n in range(max(mib // 16, 1))}  # 16 MiB each
    for each in state.values():
        each.fill_(1.0)
    rows = []
    with tempfile.TemporaryDirectory(prefix="latency-") as root:
        for kind in ("network", "disk"):
            line = None
            if kind == "network":
                line = Line(latency, stream, total, moves=False)
            best: dict[str, list[float]] = {}
            for turn in range(rounds):
                for said in (*settings, None):
                    found = measure(Path(root), state, line, said, turn)
                    for what, value in found.items():
                        best.setdefault(f"{what} {said or 'ours'}", []).append(value)
            for what in ("save", "load"):
                values = {
                    key.partition(" ")[2]: sorted(each)[len(each) // 2]
                    for key, each in best.items()
                    if key.startswith(what)
                }
                ours = values.pop("ours")
                rows.append(
                    {
                        "path": kind,
                        "what": what,
                        **{f"{n} MB/s": value / 1e6 for n, value in values.items()},
                        "ours MB/s": ours / 1e6,
                        "of the best": ours / max(values.values()),
                    }
                )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="size of the state")
    parser.add_argument("--latency", type=float, default=0.005, help="seconds a request")
    parser.add_argument("--stream", type=float, default=1e9, help="bytes a second of one request")
    parser.add_argument("--total", type=float, default=6e9, help="bytes a second of all of them")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="write the results here")
    options = parser.parse_args()
    rows = run(
        mib=options.mib,
        latency=options.latency,
        stream=options.stream,
        total=options.total,
        rounds=options.rounds,
        settings=SETTINGS,
    )
    for what in ("save", "load"):
        chosen = [list(row.values()) for row in rows if row["what"] == what]
        print(table(chosen, header=list(rows[0])))
    write_json(options.json, {"options": vars(options), "rows": rows})


if __name__ == "__main__":
    main()
