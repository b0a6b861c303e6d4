"""The folders ``step-<n>`` below a path or URL: which there are, which may go, and how they go."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dcp_fsdp_osd.errors import StorageError
from dcp_fsdp_osd.storage.latest import commits
from dcp_fsdp_osd.storage.location import is_local, join, local_path, resolve
from dcp_fsdp_osd.storage.metadata import metadata_name
from dcp_fsdp_osd.storage.reader import StreamingReader
from dcp_fsdp_osd.storage.redact import display_url
from dcp_fsdp_osd.storage.session import LONG, Session, make_session
from dcp_fsdp_osd.storage.transfer import Stats
from dcp_fsdp_osd.storage.writer import StreamingWriter

__all__ = ["Retention", "Steps"]

_FOLDER = re.compile(r"step-(0|[1-9]\d*)")
_DEBRIS = re.compile(r"__.*\.(distcp|aborted|committing)|\.metadata\.[0-9a-f]+\.tmp")
_METADATA = re.compile(r"(__\d+)?\.metadata")


@dataclass(frozen=True)
class Retention:
    """Which checkpoints are kept: the `last` newest ones (None: all), and those of steps that
    `every` divides.
    """

    last: int | None
    every: int | None = None

    def obsolete(
        self, committed: Iterable[int], newest: int, damaged: Collection[int] = ()
    ) -> list[int]:
        """Those of `committed` that may go, oldest first, now that `newest` is there.

        Damaged ones stand for none that is kept.  What is newer than `newest` is of another run,
        or of an abandoned one, and stays.
        """
        older = sorted(step for step in committed if step < newest)
        if self.last is None:
            return []
        good = [step for step in older if step not in damaged]
        kept = set(good[max(len(good) - self.last + 1, 0) :])
        kept.update(step for step in good if self.every and step % self.every == 0)
        return [step for step in older if step not in kept]


class Steps:
    """The checkpoints of one place.  No collectives; every call asks the storage.

    Args:
        session_options: of ``make_session``.
        writer_options, reader_options: of ``StreamingWriter`` and ``StreamingReader`` beside those.

    Attributes:
        damaged: steps whose checkpoint could not be loaded.
    """

    def __init__(
        self,
        path_or_url: str | os.PathLike[str],
        session_options: Mapping[str, Any],
        writer_options: Mapping[str, Any] | None = None,
        reader_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._options = dict(session_options)
        self.writer_options = {**self._options, **(writer_options or {})}
        self.reader_options = {**self._options, **(reader_options or {})}
        self.url = resolve(path_or_url)
        self.damaged: set[int] = set()
        # What they do not take is said now, and not at the first save.
        StreamingWriter(self.at(0), **self.writer_options)
        StreamingReader(self.at(0), **self.reader_options)

    @property
    def shown(self) -> str:
        """The path or URL without secrets."""
        return display_url(self.url)

    @property
    def is_local(self) -> bool:
        return is_local(self.url)

    def at(self, step: int) -> str:
        """The path or URL of a step's checkpoint."""
        return join(self.url, f"step-{step}")

    def session(self, step: int) -> Session:
        """A session in a step's folder; the caller's to close."""
        return make_session(self.at(step), **self._options)

    def committed(self) -> list[int]:
        """Steps of which there is a checkpoint, ascending; none where the folder is yet to be made.

        Raises:
            StorageError: the bucket does not exist, the path is a file, or the storage fails.
        """
        with self._all() as session:
            here = Path(local_path(self.url))
            if self.is_local and not session.call(here.exists, "look for the folder", Stats()):
                return []
            return _numbers(commit.folder for commit in commits(session))

    def clean(self, retention: Retention, newest: int) -> None:
        """Remove what is not to be kept, and debris of saves that were killed.

        Debris are folders of steps before `newest` without a checkpoint.
        """
        committed = self.committed()
        for step in retention.obsolete(committed, newest, self.damaged):
            self.remove(step)
            self.damaged.discard(step)
        with self._all() as session:
            begun = _numbers(session.call(session.store.folders, "list", Stats(), patience=LONG))
        for step in begun:
            if step < newest and step not in committed:
                self.remove_debris(step)

    def _all(self) -> contextlib.closing[Session]:
        """Its own for each call: they come from several threads."""
        return contextlib.closing(make_session(self.url, **self._options))

    def remove(self, step: int) -> None:
        """The metadata first: whatever ends this, no checkpoint of which a part is gone is left."""
        with contextlib.closing(self.session(step)) as session:
            stats = Stats()
            session.call(lambda: session.store.delete([metadata_name()]), "delete", stats)
            names = list(session.call(session.store.sizes, "list", stats, patience=LONG))
            session.call(lambda: session.store.delete(names), "delete", stats, patience=LONG)
            self._remove_if_empty(session)

    def remove_debris(self, step: int) -> None:
        """What failed saves left in a step's folder, if there is no checkpoint in it."""
        with contextlib.closing(self.session(step)) as session:
            stats = Stats()
            found = session.call(session.store.sizes, "list", stats, patience=LONG)
            if any(map(_METADATA.fullmatch, found)):
                return  # a checkpoint, of single ranks or of just now
            names = [name for name in found if _DEBRIS.fullmatch(name)]
            session.call(lambda: session.store.delete(names), "delete", stats, patience=LONG)
            with contextlib.suppress(Exception):  # not everybody may list uploads
                for name, upload in session.call(session.store.uploads, "list uploads", stats):
                    abort = partial(session.store.abort_upload, name, upload)
                    session.call(abort, f"abort an upload of {name}", stats)
            self._remove_if_empty(session)

    def tidy(self, step: int) -> None:
        """Remove what a save that was killed in its commit left beside its checkpoint.

        Its note goes last of all, so that nothing is left where there is none.
        """
        with contextlib.closing(self.session(step)) as session:
            stats = Stats()
            found = session.call(session.store.sizes, "list", stats, patience=LONG)
            if not any(name.endswith(".committing") for name in found):
                return
            metadata = StreamingReader(self.at(step), **self.reader_options).read_metadata()
            live = {getattr(each, "relative_path", None) for each in metadata.storage_data.values()}
            names = [name for name in found if _DEBRIS.fullmatch(name) and name not in live]
            session.call(lambda: session.store.delete(names), "delete", stats, patience=LONG)

    def _remove_if_empty(self, session: Session) -> None:
        """Object storage has no empty folders."""
        if session.is_local:
            with contextlib.suppress(StorageError, OSError):
                folder = Path(local_path(session.config.url))
                session.call(folder.rmdir, "remove the folder", Stats())


def _numbers(folders: Iterable[str]) -> list[int]:
    return sorted(int(found[1]) for found in map(_FOLDER.fullmatch, folders) if found)
