"""From files that are written to a checkpoint that exists, or back to nothing.

The checkpoint exists when its metadata file does.  So that is put last and in one atomic step,
and nothing that a committed metadata file names is touched before another one has replaced it.
At each moment, whoever is killed, the folder holds the old checkpoint, the new one, or none;
beside it may lie files that no metadata names, which the next commit there deletes.

Where several saves write to one folder, the first that commits wins: a save replaces the checkpoint
that it found when it began, or none, and fails where another was committed since.  Commits take
turns (``turn.py``).  So whatever lay there when a save began may be deleted once it has committed:
it belonged to the checkpoint that was replaced, to dead saves, or to saves that have lost.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from dcp_fsdp_osd.errors import CorruptCheckpointError, StorageError
from dcp_fsdp_osd.storage.metadata import MAX_METADATA_BYTES, metadata_name
from dcp_fsdp_osd.storage.session import LONG, SYNCED, Session
from dcp_fsdp_osd.storage.store import Store
from dcp_fsdp_osd.storage.transfer import Deadline, StalledError, Stats
from dcp_fsdp_osd.storage.turn import Turn
from dcp_fsdp_osd.storage.workers import Workers

__all__ = ["Committer"]

logger = logging.getLogger(__name__)
T = TypeVar("T")

_RANK_METADATA = re.compile(r"__\d+\.metadata")
_NOTE = "aborted"
_ENDINGS = (".distcp", f".{_NOTE}", ".committing")
_TAIL = 20  # bytes of a metadata file that differ from save to save: its seal


@dataclass(frozen=True)
class _Found:
    """What lay in the folder when a save began.

    `mark` tells one committed checkpoint from another; None if there was none.
    """

    names: frozenset[str]
    others: frozenset[str]  # metadata files in the way of ours, other than the one of our name
    mark: tuple[int, bytes] | None


class Committer:
    """The commit protocol of one save.

    Call order: :meth:`check_free` on the coordinator before anything is written; on each rank the
    files, then :meth:`raise_if_aborted`; :meth:`publish` on the coordinator.  A rank that fails
    calls :meth:`remove`, and :meth:`abort_all` if the save's id is known to all ranks.

    All cleaning up after a failure takes at most ``stall_seconds`` together, from its first step:
    what is not done by then is left to the next save there.

    `rank` is None, or this rank's number in a save without collectives, where each rank commits a
    metadata file of its own.  Once the `deadline` is over nothing is committed any more.
    """

    def __init__(
        self,
        session: Session,
        stats: Stats,
        *,
        rank: int | None,
        overwrite: bool,
        deadline: Deadline | None = None,
    ) -> None:
        self._due = deadline or Deadline(None)
        self._session = session
        self._stats = stats
        self._rank = rank
        self._name = metadata_name(rank)
        self._overwrite = overwrite
        self._clean_until: float | None = None  # once cleaning up has begun
        self._turn = Turn(self.call, session.url, rank=rank, stall=session.config.stall_seconds)
        self._begun: _Found | None = None
        self._own = "__" if rank is None else f"__{rank}_"
        self._uploads: Future[list[tuple[str, str]]] | None = None  # under way before the commit

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_uploads": None}

    def call(
        self, call: Callable[[Store], T], what: str, *, nbytes: int = 0, patience: int = 1
    ) -> T:
        """`call(store)` as :meth:`Session.call` does it."""
        self._check_due(what)
        try:
            return self._session.call(
                lambda: call(self._session.store),
                what,
                self._stats,
                self._late,
                nbytes=nbytes,
                patience=patience,
            )
        except FileNotFoundError as error:
            raise StorageError(
                f"{self._session.url}: {what}: the folder or bucket does not exist"
            ) from error

    def _check_due(self, what: str) -> None:
        if self._clean_until is None:
            self._due.check(f"{self._session.url}: {what}")

    def quietly(self, what: str, *calls: Callable[[], Any]) -> None:
        """Clean up, all `calls` at once, without hiding the error that made it necessary."""
        if not calls:
            return
        left = self._time_left()
        # Executors of concurrent.futures take no calls any more when the interpreter ends.
        threads = Workers(len(calls), "dcp_fsdp_osd_clean")
        done, late = wait([threads.submit(call) for call in calls], timeout=left)
        threads.end(0)
        for error in filter(None, [future.exception() for future in done]):
            if not isinstance(error, Exception):
                raise error
            logger.warning("%s: could not %s: %s", self._session.url, what, type(error).__name__)
        if late:
            logger.warning("%s: could not %s in time", self._session.url, what)

    def _time_left(self) -> float:
        """Seconds that cleaning up may still take; it begins here, if it has not."""
        now = time.monotonic()
        if self._clean_until is None:
            self._clean_until = now + self._session.config.stall_seconds
        return max(self._clean_until - now, 0.0)

    def _late(self) -> bool:
        return self._clean_until is not None and time.monotonic() > self._clean_until

    def check_free(self) -> None:
        """Raise if a checkpoint is there that must not or cannot be overwritten."""
        found = self.call(lambda store: store.sizes(), "list", patience=LONG)
        there = self._markers(found)
        if there and not self._overwrite:
            raise self._exists()
        if self._rank is not None and metadata_name() in there:
            raise StorageError(
                f"{self._session.url}: a checkpoint of all ranks exists, which ranks that save "
                "without collectives cannot replace in one step; write elsewhere"
            )
        self._begun = self._look(found)
        if not self._session.is_local:
            # Beside the writing: the first listing may have to load a client.
            lister = Workers(1, "dcp_fsdp_osd_uploads")
            self._uploads = lister.submit(self._session.store.uploads)
            lister.end(0)

    def _look(self, found: Mapping[str, int]) -> _Found:
        self._turn.look(found)
        mark = None
        if self._name in found:
            size = found[self._name]
            tail = bytearray(min(size, _TAIL))
            try:
                self.call(
                    lambda store: store.read_into(self._name, size - len(tail), [memoryview(tail)]),
                    f"read {self._name}",
                )
            except (EOFError, StorageError) as error:
                # It was replaced after it was listed: what it is now is looked for later.
                if isinstance(error, StorageError) and not isinstance(
                    error.__cause__, FileNotFoundError
                ):
                    raise
            mark = (size, bytes(tail))
        return _Found(frozenset(found), frozenset(self._markers(found) - {self._name}), mark)

    def publish(self, data: bytes, files: Mapping[str, int]) -> None:
        """Make `files` (name -> size) the checkpoint that the metadata `data` describes.

        Raises:
            CorruptCheckpointError: a file is not as it was written; nothing is committed.
            StorageError: a checkpoint exists, another save was committed since this one began, the
                deadline is over, or the commit failed.
        """
        uploads = self._abandoned_uploads(files)
        try:
            try:
                found = self._turn.take()
                self._check_unchanged(found)
                self._check(files, found)
            except BaseException:
                self.quietly("remove the failed save", lambda: self.remove(files))
                raise
            self._put(data, files)
        except BaseException:
            self.quietly("let other saves commit", self._turn.give_back)
            raise
        debris = self._debris(files, found)
        if self._turn.note is not None:
            debris.append(self._turn.note)
        self.quietly("remove what the new one replaces", lambda: self.remove(debris))

        def abort() -> None:
            for name, upload in uploads:
                self._session.store.abort_upload(name, upload)

        self.quietly("abort the uploads of dead saves", *([abort] if uploads else []))

    def _abandoned_uploads(self, files: Collection[str]) -> list[tuple[str, str]]:
        """Uploads of saves that were killed, or that will find that they have lost to this one.

        What cannot be listed is not cleaned up; not everybody may list it.
        """
        if self._uploads is None:
            return []
        patience = min(self._session.config.stall_seconds, 10)
        with contextlib.suppress(Exception):
            return [
                (name, upload)
                for name, upload in self._uploads.result(patience)
                if name.startswith(self._own) and name.endswith(".distcp") and name not in files
            ]
        return []

    def _check_unchanged(self, found: Mapping[str, int]) -> None:
        """Raise if another save was committed since this one began."""
        if not self._overwrite and self._name in found:
            raise self._exists()
        now = self._look(found)
        if self._begun is None:
            self._begun = now
        if now.mark not in (None, self._begun.mark) or now.others - self._begun.others:
            raise StorageError(
                f"{self._session.url}: another save was committed here while this one was written, "
                "so this one is given up and its files are removed; let every job save to a path "
                "of its own"
            )

    def remove(self, names: Collection[str]) -> None:
        """Delete files; missing ones are no error."""
        if names:
            self.call(
                lambda store: store.delete(names), f"delete {len(names)} files", patience=LONG
            )

    def abort_all(self, save_id: str) -> None:
        """Remove all ranks' files of a save that failed here, and tell those that still write.

        They look for the note after their last file is complete.  On a consistent store a file is
        either listed here, or was completed after the note was written; then its rank sees it.
        """
        note = _note(save_id)
        self.quietly(
            "note the failure",
            lambda: self.call(lambda store: store.put(note, b"", exclusive=False), "note"),
        )

        def remove_listed() -> None:
            found = self.call(lambda store: store.sizes(), "list", patience=LONG)
            self.remove([name for name in found if name.endswith(f"_{save_id}.distcp")])

        self.quietly("remove the failed save", remove_listed)

    def raise_if_aborted(self, save_id: str) -> None:
        """Raise if another rank has given this save up."""
        try:
            self._session.call(
                lambda: self._session.store.size(_note(save_id)),
                "look for a failed rank",
                self._stats,
            )
        except FileNotFoundError:
            return
        raise StorageError(f"{self._session.url}: another rank failed to write its part")

    def _markers(self, names: Collection[str]) -> set[str]:
        """The metadata files that stand in the way of ours."""
        if self._rank is not None:
            return {self._name, metadata_name()} & set(names)
        return {name for name in names if name == self._name or _RANK_METADATA.fullmatch(name)}

    def _check(self, files: Mapping[str, int], found: Mapping[str, int]) -> None:
        wrong = [
            f"{name}: expected {size} bytes, found {found.get(name, 'no such file')}"
            for name, size in sorted(files.items())
            if found.get(name) != size
        ]
        if wrong:
            raise CorruptCheckpointError(
                f"{self._session.url}: not committed, {len(wrong)} of {len(files)} files are not "
                f"as they were written: {'; '.join(wrong[:10])}"
            )

    def _put(self, data: bytes, files: Mapping[str, int]) -> None:
        """The one step after which the checkpoint exists."""
        name = self._name
        tries = itertools.count()

        def put(store: Store) -> None:
            if next(tries):
                self._check_due(f"commit {name}")
                self._turn.check(store)
            store.put(name, data, exclusive=not self._overwrite)

        try:
            self.call(put, f"commit {name}", nbytes=len(data), patience=SYNCED)
        except BaseException as error:
            # The answer may have been lost after the server had done it: look what is there.
            # Where that fails too the files stay, because they may be part of a checkpoint.
            self._time_left()
            try:
                found = self._session.call(
                    lambda: self._session.store.read(name, MAX_METADATA_BYTES),
                    f"read {name}",
                    self._stats,
                    self._late,
                    nbytes=len(data),
                )
            except FileNotFoundError:
                found = b""
            if found == data:
                return
            if not isinstance(error, StalledError):  # which may be done yet
                self.quietly("remove the failed save", lambda: self.remove(files))
            if isinstance(error, FileExistsError):
                raise self._exists() from None
            raise

    def _debris(self, files: Mapping[str, int], found: Collection[str]) -> list[str]:
        """What this commit made useless: files `found` that lay there when this save began."""
        temporary = re.compile(rf"{re.escape(self._name)}\.[0-9a-f]+\.tmp")
        assert self._begun is not None
        old = self._begun.names & set(found)
        markers = self._markers(old) - {self._name}
        data = [
            name
            for name in old
            if (name.startswith(self._own) and name.endswith(_ENDINGS)) or temporary.fullmatch(name)
        ]
        # Metadata files first: what is left when this is cut short names no missing file.
        return [*sorted(markers), *sorted(set(data) - set(files))]

    def _exists(self) -> StorageError:
        return StorageError(
            f"a checkpoint already exists at {self._session.url}; write elsewhere or pass "
            "overwrite=True"
        )


def _note(save_id: str) -> str:
    return f"__{save_id}.{_NOTE}"
