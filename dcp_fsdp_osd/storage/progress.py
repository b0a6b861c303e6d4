"""One progress bar on rank 0 in a terminal; log lines elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

__all__ = ["Progress"]

logger = logging.getLogger(__name__)
_LOG_EVERY = 10.0  # seconds


class Progress:
    """Bytes done of a total, shown while a ``with`` block runs.  Used from one thread."""

    def __init__(self, what: str, total: int, *, rank: int, enabled: bool) -> None:
        self._what = what
        self._total = total
        self._rank = rank
        self._enabled = enabled
        self._done = 0
        self._begin = self._logged = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> Progress:
        if self._enabled and self._rank == 0 and sys.stderr.isatty():
            try:
                from tqdm import tqdm
            except ImportError:
                pass
            else:
                self._bar = tqdm(
                    total=self._total, desc=self._what, unit="B", unit_scale=True, leave=False
                )
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
        elif self._enabled:
            self._log()

    def add(self, count: int) -> None:
        """`count` more bytes are done."""
        self._done += count
        if self._bar is not None:
            self._bar.update(count)
        elif self._enabled and time.monotonic() - self._logged > _LOG_EVERY:
            self._log()

    def _log(self) -> None:
        self._logged = time.monotonic()
        seconds = max(self._logged - self._begin, 1e-9)
        rate = self._done / seconds
        left = max(self._total - self._done, 0) / rate if rate else float("inf")
        logger.info(
            "%s: rank %d: %.1f of %.1f MB, %.1f MB/s, %.0f s left",
            self._what, self._rank, self._done / 1e6, self._total / 1e6, rate / 1e6, left,
        )  # fmt: skip
