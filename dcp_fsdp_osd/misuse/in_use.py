"""One planner, reader or writer serves one save or load at a time; a second one is refused.

They keep what the current ``dcp.save`` or ``dcp.load`` is about.  Used from two threads at once
(two ``dcp.async_save`` that overlap), one would write the other's values, or to the other's path.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from dcp_fsdp_osd.errors import LayoutError
from dcp_fsdp_osd.misuse.default_device import cpu_by_default

__all__ = ["InUse", "begins", "goes_on", "resets"]

P = ParamSpec("P")
R = TypeVar("R")


class InUse:
    """Which thread's save or load an object serves; DCP makes all calls of one from one thread.

    A save or load is under way for as long as its thread is in the call of DCP that it began in,
    so that nobody needs to say that it has ended, or failed.  Of two that DCP did not call, the
    last one is served: the one before is refused when it goes on, before it changes anything.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._call = 0
        self._inside = 0  # methods that the thread is in
        self._reset: set[int] = set()  # threads that have said where to, and have not begun
        self._refused: set[int] = set()  # threads that were not told yet

    def __reduce__(self) -> tuple[Any, ...]:
        return InUse, ()  # of another process, or of a copy, nothing is under way

    @contextlib.contextmanager
    def beginning(self, *, anew: bool = False) -> Iterator[bool]:
        """Serve this thread from now on: True. False if another one's save or load is under way,
        or has come between; what begins `anew`, with a path of its own, forgets what was before.
        """
        thread = threading.get_ident()
        with self._lock:
            overtaken = thread in self._reset and not anew
            if self._thread not in (None, thread) and (
                self._inside or self._is_under_way() or overtaken
            ):
                self._refused.add(thread)
            elif anew:
                self._refused.discard(thread)
            served = thread not in self._refused
            if served:
                (self._reset.add if anew else self._reset.discard)(thread)
                # Older dcp.async_save resets, and has another thread do that again and begin.
                self._call = 0 if anew else next(reversed(_calls(sys._getframe())), 0)
                self._thread = thread
                self._inside += 1
        try:
            yield served
        finally:
            if served:
                self._leave()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """The save or load goes on in here.

        Raises:
            LayoutError: it is not served.
        """
        thread = threading.get_ident()
        with self._lock:
            if self._thread not in (None, thread) or thread in self._refused:
                raise self.refusal()
            self._thread = thread
            self._inside += 1
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._inside -= 1

    def _is_under_way(self) -> bool:
        stack = sys._current_frames().get(self._thread) if self._thread is not None else None
        return self._call in _calls(stack)

    def refusal(self) -> LayoutError:
        """The error for what is not served; whoever asks raises it."""
        for threads in (self._refused, self._reset):
            threads.discard(threading.get_ident())
        return LayoutError(
            "expected a planner, a reader and a writer to be used for one save or load at a time, "
            "found that another thread uses this one: make others for each, or wait for the "
            "future of dcp.async_save first"
        )


def _calls(frame: FrameType | None) -> list[int]:
    """The calls of DCP on a stack, the outmost last; their numbers hold while they last."""
    found = []
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith("torch.distributed.checkpoint"):
            found.append(id(frame))
        frame = frame.f_back
    return found


class _Used(Protocol):
    _in_use: InUse


S = TypeVar("S", bound=_Used)


def begins(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """A method that a save or load begins with; LayoutError if it is not served.

    As in the other ones, the caller's default device is not ours.
    """

    @functools.wraps(method)
    def alone(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._in_use.beginning() as served:
            if not served:
                raise self._in_use.refusal()
            with cpu_by_default():
                return method(self, *args, **kwargs)

    return alone


def resets(method: Callable[Concatenate[S, P], None]) -> Callable[Concatenate[S, P], None]:
    """A method that DCP calls before all others, and does not tell other ranks of its errors: of
    what is not served it does nothing, and the next one raises.
    """

    @functools.wraps(method)
    def alone(self: S, /, *args: P.args, **kwargs: P.kwargs) -> None:
        with self._in_use.beginning(anew=True) as served:
            if served:
                method(self, *args, **kwargs)

    return alone


def goes_on(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """A method that a save or load which has begun goes on with; LayoutError if not served."""

    @functools.wraps(method)
    def alone(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._in_use.step(), cpu_by_default():
            return method(self, *args, **kwargs)

    return alone
