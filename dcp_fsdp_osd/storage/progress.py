"""One progress bar on rank 0 in a terminal; log lines elsewhere."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from typing import Any

__all__ = ["Progress"]

logger = logging.getLogger(__name__)
_LOG_EVERY = 10.0  # seconds


class Progress:
    """Bytes done of a total, shown while a ``with`` block runs.  Used from one thread.

    The total is what was planned and may be a little off; a block that ends without an error ends
    with 100 %.
    """

    def __init__(self, what: str, total: int, *, rank: int, enabled: bool) -> None:
        self._what = what
        self._total = total
        self._rank = rank
        self._enabled = enabled
        self._done = 0
        self._begin = self._logged = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> Progress:
        if self._enabled and self._rank == 0 and _in_terminal():
            try:
                from tqdm import tqdm
            except ImportError:
                pass
            else:
                self._bar = tqdm(total=self._total, desc=self._what, unit="B", unit_scale=True)
        if self._enabled and self._rank == 0 and self._bar is None:
            self._say_how_to_see_it()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._total = self._done
        if self._bar is not None:
            with contextlib.suppress(OSError, ValueError):
                self._bar.total = self._total
                self._bar.refresh()
                self._bar.close()
        elif self._enabled:
            self._log(ended=kind is None)

    def add(self, count: int) -> None:
        """`count` more bytes are done."""
        self._done += count
        if self._bar is not None:
            with contextlib.suppress(OSError, ValueError):  # the terminal has gone
                self._bar.update(count)
        elif self._enabled and time.monotonic() - self._logged > _LOG_EVERY:
            self._log()

    def _log(self, *, ended: bool = False) -> None:
        self._logged = time.monotonic()
        seconds = max(self._logged - self._begin, 1e-9)
        rate = self._done / seconds
        left = max(self._total - self._done, 0) / rate if rate else float("inf")
        percent = 100 if ended else min(99, 100 * self._done // max(self._total, 1))
        with contextlib.suppress(OSError, ValueError):  # of a handler whose stream is closed
            logger.info(
                "%s: rank %d: %d %%, %.1f of %.1f MB, %.1f MB/s, %.0f s left",
                self._what, self._rank, percent,
                self._done / 1e6, self._total / 1e6, rate / 1e6, left,
            )  # fmt: skip

    def _say_how_to_see_it(self) -> None:
        if not logger.isEnabledFor(logging.INFO):
            with contextlib.suppress(OSError, ValueError):
                logger.warning(
                    "progress=True: this is no terminal with a bar (of the package tqdm), so "
                    "progress is logged, by the logger %r at level INFO, which is not shown now: "
                    "logging.basicConfig(level=logging.INFO) shows it",
                    logger.name,
                )


def _in_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, OSError, ValueError):  # None, or closed
        return False
