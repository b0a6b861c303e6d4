"""Says in the log which ranks a save or load waits for.

``dcp.save``, ``dcp.load`` and our verify functions gather every rank's plan.  Where one rank never
calls them, the others wait until their process group gives up, half an hour by default, with an
error that names nobody.  Which ranks came is known to the job's store alone.

A save that does not wait costs the start of a thread, and nothing else: only a rank that has waited
for :data:`AFTER` seconds begins to count in the store that it is there, and one of those that do
reads the others' counts, after as long again.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import weakref
from typing import Any, TypeVar

import torch.distributed as dist

from dcp_fsdp_osd.compat import job_store
from dcp_fsdp_osd.errors import several

__all__ = ["watched"]

logger = logging.getLogger(__name__)
AFTER = 10.0
"""Seconds after which a rank says that it waits."""
PERIOD = 2.0
"""Seconds between two of its signs of life; one that shows none for two periods is not there."""
_SHOWN = 16
_OWN_GROUP = (
    ". dcp.async_save needs a process group of its own, process_group=dist.new_group(backend="
    "'gloo'): over that of training its messages mix with training's"
)

P = TypeVar("P")


def watched(plan: P, what: str) -> P:
    """``plan``; while it is alive it is gathered, and the log says for whom that waits.

    Args:
        plan: a local plan that nobody but DCP keeps.
        what: is gathered for, e.g. ``"save to s3://..."``.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        ended = threading.Event()
        weakref.finalize(plan, ended.set).atexit = False
        watch = _Watch(what, ended, threading.get_ident())
        # A daemon: nothing is lost with it, and it ends with the plan.
        threading.Thread(target=watch.run, name="dcp_fsdp_osd-waiting", daemon=True).start()
    return plan


class _Watch:
    def __init__(self, what: str, ended: threading.Event, caller: int) -> None:
        self._what, self._ended, self._caller = what, ended, caller
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._begin = time.monotonic()
        self._store: Any = None
        self._leading, self._lease = False, -1

    def run(self) -> None:
        if self._ended.wait(AFTER):
            return
        try:
            self._store = dist.PrefixStore("dcp_fsdp_osd/waiting", job_store())  # type: ignore[attr-defined]
            self._watch()
        except Exception as error:  # nobody waits for this thread, and DCP's own error will come
            logger.debug("cannot find out which ranks %s waits for: %s", self._what, error)

    def _watch(self) -> None:
        report = 2 * AFTER
        while self._sign():
            if self._leading and time.monotonic() - self._begin >= report:
                missing = self._missing()
                if self._ended.is_set() or not self._waits():
                    return
                if missing:
                    self._report(missing)
                    report = 2 * (time.monotonic() - self._begin)

    def _sign(self) -> bool:
        """Show that this rank is there, and wait a period; False once there is nothing to wait for.

        One of the ranks that wait leads: the others see it count in the key ``lease``.
        """
        self._store.add(f"rank/{self._rank}", 1)
        if self._leading:
            self._store.add("lease", 1)
        else:
            lease = self._store.add("lease", 0)
            if lease == self._lease:
                self._leading = self._store.add("lease", 1) == lease + 1
            self._lease = lease
        return not self._ended.wait(PERIOD) and self._waits()

    def _missing(self) -> list[int]:
        """Ranks that show no sign for two periods."""
        before = [self._store.add(f"rank/{rank}", 0) for rank in range(self._world)]
        for _ in range(2):
            if not self._sign():
                return []
        return [
            rank
            for rank, count in enumerate(before)
            if rank != self._rank and self._store.add(f"rank/{rank}", 0) == count
        ]

    def _waits(self) -> bool:
        """Whether the caller is still in DCP, and not in the handling of an error of it, which may
        keep the plan alive."""
        frame = sys._current_frames().get(self._caller)
        while frame is not None:
            if frame.f_code.co_name == "reduce_scatter":
                return True
            frame = frame.f_back
        return False

    def _report(self, missing: list[int]) -> None:
        logger.warning(
            "rank %d has waited %.0f s for all ranks to begin the %s. Not heard of: %s, of %d. "
            "All ranks of its process group must call it; if that is not the whole job, ranks "
            "outside of it are not waited for%s",
            self._rank,
            time.monotonic() - self._begin,
            self._what,
            several([str(rank) for rank in missing], _SHOWN),
            self._world,
            "" if self._caller == threading.main_thread().ident else _OWN_GROUP,
        )
