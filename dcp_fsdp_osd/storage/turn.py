"""One save at a time commits in a folder, on stores that can write, list and delete, and no more.

Conditional writes would do it in one request, but file systems have none, and some servers take
the condition and ignore it.
"""

from __future__ import annotations

import logging
import random
import re
import time
import uuid
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

from dcp_fsdp_osd.errors import StorageError
from dcp_fsdp_osd.storage.session import LONG
from dcp_fsdp_osd.storage.store import Store

__all__ = ["Turn"]

logger = logging.getLogger(__name__)
T = TypeVar("T")
_PATIENCE = 10  # times the age at which a note is taken for a dead save's


class Turn:
    """The right to commit, among all saves to one folder (of one rank, without collectives).

    A save puts a note there, then lists the folder.  If it sees no other note it has the turn,
    because whoever puts one later sees this one.  Of saves that see each other, that with the least
    name waits for the others, which take theirs back until its is gone (Lamport, "A New Solution
    of Dijkstra's Concurrent Programming Problem", 1974).  It takes consistent listings.

    A note that stays for `stall` seconds is a killed save's, and is removed by who waits for it.  A
    live one that stalled as long finds that out by :meth:`check`, before it repeats a request.

    Args:
        call: ``call(operation, what, patience=1)`` makes a call of the store, with retries.
        where: begins error messages.
        rank: as for ``Committer``.
        stall: seconds.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        where: str,
        *,
        rank: int | None,
        stall: float,
    ) -> None:
        self._call = call
        self._where = where
        self._stall = stall
        self._prefix = "__" if rank is None else f"__{rank}_"
        self._pattern = re.compile(rf"{self._prefix}[0-9a-f]{{32}}\.committing")
        self._seen: dict[str, float] = {}  # notes of others, and when they were seen first
        self.note: str | None = None
        """The name of this save's note, while there is one."""

    def look(self, names: Iterable[str]) -> list[str]:
        """The notes of others among `names`, which were listed now; their ages count from here."""
        now = time.monotonic()
        notes = [name for name in names if self._pattern.fullmatch(name) and name != self.note]
        self._seen = {name: self._seen.get(name, now) for name in notes}
        return notes

    def take(self) -> dict[str, int]:
        """Wait for the turn; names and sizes of the files that are there then.

        Raises:
            StorageError: others have been committing for ten times the stall limit.
        """
        begin, pause = time.monotonic(), 0.01
        others: Collection[str] = ()
        while True:
            if self.note is None and not others:
                self._put(f"{self._prefix}{uuid.uuid4().hex}.committing")
            found: dict[str, int] = self._call(lambda store: store.sizes(), "list", patience=LONG)
            others = self.look(found)
            if self.note in found and not others:
                return found
            now = time.monotonic()
            if now - begin > _PATIENCE * self._stall:
                raise StorageError(
                    f"{self._where}: not committed: {len(others)} other saves have been committing "
                    f"here for {now - begin:.0f} s"
                )
            dead = [name for name in others if now - self._seen[name] > self._stall]
            if dead:
                logger.warning("%s: a save was killed while it committed", self._where)
                self._remove(dead)
            if self.note is not None and (self.note not in found or min(others) < self.note):
                self.give_back()
            time.sleep(random.uniform(pause / 2, pause))
            pause = min(2 * pause, 1.0)

    def _put(self, note: str) -> None:
        self.note = note
        self._call(lambda store: store.put(note, b"", exclusive=False), "note")

    def check(self, store: Store) -> None:
        """Raise if others have taken this save for dead."""
        try:
            if self.note is not None:
                store.size(self.note)
        except FileNotFoundError:
            raise StorageError(
                f"{self._where}: not committed: the commit took more than {self._stall:.0f} s, and "
                "another save went on without it"
            ) from None

    def give_back(self) -> None:
        """Let others commit."""
        note, self.note = self.note, None
        if note is not None:
            self._remove([note])

    def _remove(self, names: list[str]) -> None:
        self._call(lambda store: store.delete(names), "remove a note")
