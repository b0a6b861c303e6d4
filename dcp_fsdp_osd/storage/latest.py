"""Find the newest checkpoint."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dcp_fsdp_osd.errors import StorageError
from dcp_fsdp_osd.storage.location import is_named, join, local_path, resolve
from dcp_fsdp_osd.storage.once import from_first_rank
from dcp_fsdp_osd.storage.session import LONG, Session, make_session
from dcp_fsdp_osd.storage.store import Backend, Commit
from dcp_fsdp_osd.storage.transfer import Stats

__all__ = ["commits", "latest", "natural"]


def latest(
    path_or_url: str | os.PathLike[str],
    *,
    backend: Backend = "auto",
    storage_options: Mapping[str, Any] | None = None,
    process_group: dist.ProcessGroup | None = None,
    stall_seconds: float = 60.0,
) -> str | None:
    """The path or URL of the newest committed checkpoint in a folder of checkpoints; None if none.

    Checkpoints are the folders directly below `path_or_url` that hold a ``.metadata``; the newest
    is the one whose ``.metadata`` was written last.  Where the clock does not tell (S3 counts in
    seconds), the greater name is newer, numbers in it compared as numbers: step-100 after step-20.
    Half-written folders are not seen, nor are those whose names no path or URL may have (``..``).
    The arguments are those of ``StreamingReader``.

    With a `process_group`, its first rank looks, and all of its ranks, which must all call this,
    get that one answer.  Ranks that look for themselves while a save ends may find different ones,
    which the load then refuses.

    Raises:
        StorageError: the folder or bucket does not exist (on object storage any folder of a bucket
            does), or is a file; or storage fails, or does not answer.
    """

    def newest() -> str | None:
        session = make_session(
            path_or_url,
            backend=backend,
            storage_options=storage_options,
            stall_seconds=stall_seconds,
        )
        try:
            found = commits(session)
        finally:
            session.close()
        if not found:
            return None
        return max(found, key=lambda commit: (int(commit.modified), natural(commit.folder))).folder

    folder = from_first_rank(process_group, "find the latest checkpoint", newest)
    return None if folder is None else join(resolve(path_or_url), folder)


def commits(session: Session) -> list[Commit]:
    """The committed checkpoints one folder below, by names that a path or URL may have.

    Raises:
        StorageError: as :func:`latest`.
    """

    def listed() -> list[Commit]:
        if session.is_local and not (path := Path(local_path(session.config.url))).is_dir():
            if path.exists():
                raise StorageError(f"{session.url} is a file; expected a folder of checkpoints")
            # None would make a run whose path was mistyped begin anew without a word.
            raise StorageError(
                f"{session.url}: the folder does not exist; mend the path, or make the folder "
                "before the first run"
            )
        return session.store.commits()

    try:
        found = session.call(listed, "list", Stats(), patience=LONG)
        return [commit for commit in found if is_named(session.config.url, commit.folder)]
    except Exception as error:
        failure = session.portable(error)
        if failure is error and not isinstance(error, FileNotFoundError):
            raise
    if isinstance(failure, FileNotFoundError):
        raise StorageError(f"{session.url}: the bucket or folder does not exist") from failure
    raise failure


def natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts the numbers in names as numbers."""
    return [
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)
    ]
