"""What every benchmark measures with: wall and CPU seconds, peak extra memory, medians, JSON.

Variants that are compared run interleaved (:func:`interleave`), after a warm-up of each,
and are reported as medians: a slow minute of the machine then hits all of them alike.
Sizes are bytes, times are seconds, rates are 1e6 bytes a second (MB/s) everywhere.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import resource
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

import torch

from dcp_fsdp_osd.storage.memory import copy_bytes

__all__ = [
    "Measured",
    "PeakMemory",
    "combine",
    "interleave",
    "machine",
    "measure",
    "median",
    "raw_bytes",
    "read_as_reader",
    "rss_bytes",
    "table",
    "write_json",
]

_CHUNK = 1 << 19
_PAGE = os.sysconf("SC_PAGE_SIZE")
_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Measured:
    """One run of one variant on one rank.

    ``peak_extra`` is how far this process's resident memory rose above where it stood
    just before the run.  ``extra`` is whatever the variant returned to be kept with it.
    """

    wall: float
    cpu: float
    peak_extra: int
    extra: dict[str, Any] = field(default_factory=dict)


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())


def read_as_reader(
    file: FileIO, view: memoryview, seen: Callable[[memoryview], object] | None
) -> None:
    """Fill `view` by way of a chunk that stays in the cache, as the reader of local files does (a
    read that hangs must not be left with the destination); `seen` takes each while it is there.
    """
    chunk = memoryview(bytearray(_CHUNK))
    for begin in range(0, len(view), _CHUNK):
        part = chunk[: len(view) - begin]
        if file.readinto(part) != len(part):
            raise OSError("short read")
        if seen is not None:
            seen(part)
        copy_bytes(view, begin, part, 0, len(part))


def rss_bytes() -> int:
    """Resident memory of this process now."""
    with Path("/proc/self/statm").open() as statm:
        return int(statm.read().split()[1]) * _PAGE


def _status_bytes(name: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{_STATUS} has no line {name!r}")


def _reset_high_water() -> bool:
    """Set VmHWM of this process to its present VmRSS; false where that is not permitted."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


class PeakMemory:
    """``with PeakMemory() as peak: ...``, then ``peak.extra``: peak resident bytes above the start.

    The kernel's own high-water mark is used where it can be reset, so no peak is missed
    however short; elsewhere a thread samples every 2 ms.  Garbage is collected first.  Memory
    that was freed before but is still held by the allocator counts as there at the start.
    """

    extra: int = 0

    def __enter__(self) -> PeakMemory:
        gc.collect()
        self._exact = _reset_high_water()
        self.start = rss_bytes()
        self._peak = self.start
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if not self._exact:
            self._thread = threading.Thread(target=self._sample, daemon=True)
            self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._stop.wait(0.002):
            self._peak = max(self._peak, rss_bytes())

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._peak = max(self._peak, rss_bytes())
        if self._exact:
            self._peak = max(self._peak, _status_bytes("VmHWM"))
        self.extra = max(0, self._peak - self.start)


def _cpu_seconds() -> float:
    """User and system seconds of this process and of its children that have ended."""
    own, kids = (
        resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return own.ru_utime + own.ru_stime + kids.ru_utime + kids.ru_stime


def measure(
    run: Callable[[], Mapping[str, Any] | None],
    *,
    barrier: Callable[[], object] | None = None,
) -> Measured:
    """Run once.  ``barrier`` (say ``dist.barrier``) lines the ranks up before the clock starts.

    The clock stops when this rank is done; :func:`combine` takes the slowest rank.
    """
    with PeakMemory() as peak:
        if barrier is not None:
            barrier()
        cpu, start = _cpu_seconds(), time.perf_counter()
        extra = run()
        wall, cpu = time.perf_counter() - start, _cpu_seconds() - cpu
    return Measured(wall, cpu, peak.extra, dict(extra or {}))


def interleave(
    variants: Mapping[str, Callable[[], Mapping[str, Any] | None]],
    *,
    rounds: int = 3,
    warmup: int = 1,
    barrier: Callable[[], object] | None = None,
    before: Callable[[str], object] | None = None,
    after: Callable[[str], object] | None = None,
) -> dict[str, list[Measured]]:
    """Run every variant in turn, ``warmup + rounds`` times over; the warm-ups are not kept.

    ``before(name)`` and ``after(name)`` run outside the clock (to make or remove files).  The
    order turns by one each round, so that no variant always follows the same other one.
    """
    names = list(variants)
    kept: dict[str, list[Measured]] = {name: [] for name in names}
    for number in range(warmup + rounds):
        turn = number % len(names) if names else 0
        for name in names[turn:] + names[:turn]:
            if before is not None:
                before(name)
            measured = measure(variants[name], barrier=barrier)
            if after is not None:
                after(name)
            if number >= warmup:
                kept[name].append(measured)
    return kept


def median(values: Iterable[float]) -> float:
    """Median; an error on no values, as a benchmark that measured nothing must not print 0."""
    return statistics.median(list(values))


def combine(ranks: Sequence[Sequence[Measured]]) -> dict[str, float]:
    """``ranks[r]`` are rank r's runs, in the same order.  Returns medians over the runs of:

    ``wall`` of the slowest rank, ``cpu`` summed over ranks, ``peak_extra`` of the worst rank;
    and ``wall_min``, ``wall_max``, the spread of ``wall``.
    """
    runs = list(zip(*ranks, strict=True))
    walls = [max(m.wall for m in run) for run in runs]
    return {
        "wall": median(walls),
        "wall_min": min(walls),
        "wall_max": max(walls),
        "cpu": median(sum(m.cpu for m in run) for run in runs),
        "peak_extra": median(max(m.peak_extra for m in run) for run in runs),
    }


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    return {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kernel": platform.release(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def table(rows: Sequence[Sequence[object]], *, header: Sequence[str]) -> str:
    """Rows as aligned text; floats get three significant digits."""
    cells = [[_cell(value) for value in row] for row in [header, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = []
    for row in cells:
        first, *rest = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join([first.strip().ljust(widths[0]), *rest]))
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)


def write_json(path: str | Path | None, results: Mapping[str, Any]) -> None:
    """Write results with the machine's description to ``path``; nothing where it is None."""
    if path is None:
        return
    document = {"machine": machine(), **results}
    Path(path).write_text(json.dumps(document, indent=1, default=_plain) + "\n")


def _plain(value: object) -> object:
    if isinstance(value, Measured):
        return asdict(value)
    raise TypeError(f"cannot write {type(value).__name__} as JSON")
