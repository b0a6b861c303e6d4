"""One planner serves one save or load at a time; a second one that begins meanwhile is refused.

Planners keep what the current ``dcp.save`` or ``dcp.load`` is about. Used from two threads at once
one of them would write the other's values.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from dcp_fsdp_osd.errors import LayoutError

__all__ = ["InUse", "begins", "goes_on"]

A = ParamSpec("A")
P = TypeVar("P")
R = TypeVar("R")


class InUse:
    """Who uses a planner now. DCP calls all of a planner's planning methods from one thread.

    The plans that a planner returns are alive for as long as the save or load is under way, and
    longer by nothing but an error's traceback, so that nobody needs to say that it has ended.
    Before there is a plan, the save or load that began last is the one: the one before is refused
    when it goes on, before it changes anything.
    """

    def __init__(self) -> None:
        self._inside = threading.RLock()  # held by a thread that is in one of the methods
        self._thread: int | None = None
        self._plan: weakref.ref[Any] | None = None

    @contextlib.contextmanager
    def step(self, *, first: bool) -> Iterator[None]:
        """One of the planner's methods, the first of a save or load or a later one, runs here.

        Raises:
            LayoutError: another thread is in one of them, or its save or load is the current one.
        """
        if not self._inside.acquire(blocking=False):
            self._refuse()
        try:
            mine = self._thread in (None, threading.get_ident())
            if first:
                if not mine and self._plan is not None and self._plan() is not None:
                    self._refuse()
                self._thread, self._plan = threading.get_ident(), None
            elif not mine:
                self._refuse()
            yield
        finally:
            self._inside.release()

    def hold(self, plan: P) -> P:
        """A copy of ``plan``, to be returned to DCP and kept nowhere else."""
        mine: P = dataclasses.replace(plan)  # type: ignore[type-var]
        self._plan = weakref.ref(mine)
        return mine

    def _refuse(self) -> None:
        raise LayoutError(
            "expected a planner to be used for one save or load at a time, found that another "
            "thread uses this one: make a planner for each"
        )


class _Used(Protocol):
    _in_use: InUse


S = TypeVar("S", bound=_Used)


def begins(method: Callable[Concatenate[S, A], R]) -> Callable[Concatenate[S, A], R]:
    """A planner's method that a save or load begins with (:meth:`InUse.step`)."""
    return _step(method, first=True)


def goes_on(method: Callable[Concatenate[S, A], R]) -> Callable[Concatenate[S, A], R]:
    """A planner's method that a save or load which has begun goes on with."""
    return _step(method, first=False)


def _step(method: Callable[Concatenate[S, A], R], *, first: bool) -> Callable[Concatenate[S, A], R]:
    @functools.wraps(method)
    def alone(self: S, /, *args: A.args, **kwargs: A.kwargs) -> R:
        with self._in_use.step(first=first):
            return method(self, *args, **kwargs)

    return alone
