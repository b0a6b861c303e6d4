"""Which checkpoints there are below a path or URL, whole and half-written ones."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, TypeVar

from dcp_fsdp_osd.errors import StorageError
from dcp_fsdp_osd.storage.latest import commits, natural
from dcp_fsdp_osd.storage.location import is_named, join, resolve
from dcp_fsdp_osd.storage.metadata import metadata_name
from dcp_fsdp_osd.storage.redact import display_url
from dcp_fsdp_osd.storage.session import LONG, Session, make_session
from dcp_fsdp_osd.storage.store import Backend
from dcp_fsdp_osd.storage.transfer import Stats

__all__ = ["Found", "call", "list_checkpoints"]

T = TypeVar("T")
_STEP = re.compile(r"(\d+)\D*")


@dataclass(frozen=True)
class Found:
    """A folder of checkpoint files.

    Attributes:
        name: of the folder; ``"."`` for the one that was asked about.
        url: its path or URL, fit to be shown.
        committed: it holds a ``.metadata``: the save was finished.
        saved: when that was written, in seconds since 1970; None where it was not.
        step: the last number in its name; None if there is none.
        files, nbytes: the files directly in it, and their bytes.
    """

    name: str
    url: str
    committed: bool
    saved: float | None
    step: int | None
    files: int
    nbytes: int

    @property
    def when(self) -> str:
        """:attr:`saved` in words, UTC."""
        if self.saved is None:
            return ""
        return datetime.fromtimestamp(self.saved, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")


def list_checkpoints(
    path_or_url: str | os.PathLike[str],
    *,
    backend: Backend = "auto",
    storage_options: Mapping[str, Any] | None = None,
) -> list[Found]:
    """The checkpoints directly below a path or URL, oldest first, then what is half-written.

    Folders that hold neither a ``.metadata`` nor a ``.distcp`` file are left out.  Where the place
    is itself a checkpoint, it is in the list too, as ``"."``.

    Raises:
        StorageError: the folder does not exist, or storage fails.
    """
    options: dict[str, Any] = {"backend": backend, "storage_options": storage_options}
    with contextlib.closing(make_session(path_or_url, **options)) as session:
        saved = {commit.folder: commit.modified for commit in commits(session)}
        folders = {*saved, *call(session, session.store.folders, "list")}
        here = _of_checkpoint(call(session, session.store.sizes, "list"))
    url = resolve(path_or_url)
    found = []
    if here is not None:
        found.append(_found(".", url, here, metadata_name() in here, None))
    for folder in folders:
        if not is_named(url, folder):
            continue
        with contextlib.closing(make_session(join(url, folder), **options)) as session:
            try:
                sizes = _of_checkpoint(call(session, session.store.sizes, "list"))
            except StorageError as error:
                if not isinstance(error.__cause__, FileNotFoundError):
                    raise
                continue  # deleted meanwhile
        if sizes is not None:
            place = join(url, folder)
            found.append(_found(folder, place, sizes, folder in saved, saved.get(folder)))
    return sorted(
        found,
        key=lambda each: (not each.committed, int(each.saved or 0), natural(each.name)),
    )


def _found(
    name: str, url: str, sizes: Mapping[str, int], committed: bool, saved: float | None
) -> Found:
    numbers = _STEP.findall(url.rstrip("/").rpartition("/")[2])
    step = int(numbers[-1]) if numbers else None
    return Found(name, display_url(url), committed, saved, step, len(sizes), sum(sizes.values()))


def _of_checkpoint(sizes: dict[str, int]) -> dict[str, int] | None:
    """The files, if they are a checkpoint's or part of one."""
    named = any(name.endswith((".metadata", ".distcp")) for name in sizes)
    return sizes if named else None


def call(session: Session, function: Callable[[], T], what: str) -> T:
    """`function()` of a store with retries; errors are StorageErrors and hold no secret."""
    try:
        return session.call(function, what, Stats(), patience=LONG)
    except Exception as error:
        failure = session.portable(error)
        if isinstance(failure, StorageError):
            if failure is error:
                raise
        else:
            cause, failure = failure, StorageError(f"{session.url}: {what}: {failure}")
            failure.__cause__ = cause
    raise failure
