"""Signals that announce the end of the job."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable
from types import FrameType
from typing import Any

__all__ = ["Preemption"]


class Preemption:
    """Notes signals, and does nothing else at the first of each kind.

    A handler that was there before is not called for that one: what handles SIGTERM ends the
    process, as a rule, and that is what is to be put off.  The second of the same kind goes to it,
    so that the job can still be ended by hand.  In a process that was forked from this one already
    the first does: whoever ends a data loader's worker means that one alone.

    Attributes:
        noticed: one has come to this process.
    """

    def __init__(self, signals: Iterable[int]) -> None:
        self.signals = tuple(dict.fromkeys(signal.Signals(number) for number in signals))
        self.noticed = False
        self._pid = 0
        self._seen: set[int] = set()
        self._previous: dict[int, Any] = {}

    def check(self) -> None:
        """Raise where handlers cannot be installed."""
        if self.signals and threading.current_thread() is not threading.main_thread():
            names = ", ".join(each.name for each in self.signals)
            raise ValueError(
                f"expected the main thread, where alone Python takes handlers for {names}: make "
                "the CheckpointManager there, or pass preempt_signals=()"
            )

    def install(self) -> None:
        self._pid = os.getpid()
        for number in self.signals:
            self._previous[number] = signal.signal(number, self._note)

    def restore(self) -> None:
        """Put the handlers back that were there before, unless others were put there since."""
        if threading.current_thread() is not threading.main_thread():
            return  # Python allows it there alone; ours only notes what comes
        for number in list(self._previous):
            self._restore(number)

    def _restore(self, number: int) -> None:
        previous = self._previous.pop(number, None)
        if signal.getsignal(number) == self._note:
            # None: a handler that was not installed from Python.
            signal.signal(number, signal.SIG_DFL if previous is None else previous)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number in self._seen or os.getpid() != self._pid:
            self._restore(number)
            os.kill(os.getpid(), number)
        self._seen.add(number)
        self.noticed = True
