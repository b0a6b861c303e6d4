"""How many requests are under way at a time, where nobody said: found out from what they move.

A local path may be the page cache, which two threads exhaust, or a network file system, where each
request waits for milliseconds and one stream gets a part of what many do.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Level"]

STEP = 4
"""So many times as many requests are tried next. A load may be over after a few dozen of them: with
twice as many, a third of it would go by on the way up."""
GAIN = 1.3
"""Throughput must grow by this factor with them, for it to stay so."""
_AGAIN = 8 * STEP
"""Turns at one level after which the next one is tried again: what was seen may be chance.  Of what
is read, one ninth is then read at a level that is too high for it."""


@dataclass
class _Mark:
    """Counts at a moment (seconds, of any clock)."""

    nbytes: int
    tasks: int
    at: float


class Level:
    """The number of requests to have under way; from `first`, to `most` at most.

    It is raised while that pays, measured over a turn of as many requests as are under way, and
    taken back where it does not.  `most` equal to `first`: it is what the user said, and stays.
    Pure: it is fed with counts and times.
    """

    def __init__(self, first: int, most: int | None = None) -> None:
        self.now = first
        self.most = first if most is None else max(most, first)
        self._mark: _Mark | None = None
        self._below: tuple[int, float] | None = None  # level before, its rate, while one is tried
        self._settled = 0  # turns since it was found not to pay

    def observe(self, nbytes: int, tasks: int, at: float) -> int:
        """The level after `nbytes` and `tasks` were done in all, at a moment in seconds."""
        if self.now == self.most and self._below is None:
            return self.now
        if self._mark is None:
            self._mark = _Mark(nbytes, tasks, at)
            return self.now
        mark = self._mark
        if tasks - mark.tasks < self.now or at <= mark.at:
            return self.now
        rate = (nbytes - mark.nbytes) / (at - mark.at)
        self._mark = _Mark(nbytes, tasks, at)
        if self._below is not None and rate < GAIN * self._below[1]:
            self.now = self._below[0]
            self._below = None
            self._settled = _AGAIN
        elif self._settled:
            self._settled -= 1
        elif self.now < self.most:
            self._below = self.now, rate
            self.now = min(STEP * self.now, self.most)
        else:
            self._below = None
        return self.now
