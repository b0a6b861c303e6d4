"""One planner serves one save or load at a time; a second one that begins meanwhile is refused.

Planners keep what the current ``dcp.save`` or ``dcp.load`` is about. Used from two threads at once
one of them would write the other's values.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from typing import Any, TypeVar

from dcp_fsdp_osd.errors import LayoutError

__all__ = ["InUse"]

P = TypeVar("P")


class InUse:
    """Who uses a planner now. DCP calls all of a planner's planning methods from one thread.

    The plans that a planner returns are alive for as long as the save or load is under way, and
    longer by nothing but an error's traceback, so that nobody needs to say that it has ended.
    """

    def __init__(self) -> None:
        self._thread: int | None = None
        self._plan: weakref.ref[Any] | None = None

    def begin(self) -> None:
        """A save or load begins, in this thread."""
        under_way = self._plan is not None and self._plan() is not None
        if under_way and self._thread != threading.get_ident():
            self._refuse()
        self._thread, self._plan = threading.get_ident(), None

    def hold(self, plan: P) -> P:
        """A copy of ``plan``, to be returned to DCP and kept nowhere else."""
        if self._thread is not None and self._thread != threading.get_ident():
            self._refuse()
        mine: P = dataclasses.replace(plan)  # type: ignore[type-var]
        self._plan = weakref.ref(mine)
        return mine

    def _refuse(self) -> None:
        raise LayoutError(
            "expected a planner to be used for one save or load at a time, found that another "
            "thread uses this one: make a planner for each"
        )
