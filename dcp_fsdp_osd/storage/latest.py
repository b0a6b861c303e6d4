"""Find the newest checkpoint."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from dcp_fsdp_osd.storage.location import join
from dcp_fsdp_osd.storage.session import make_session
from dcp_fsdp_osd.storage.store import Backend
from dcp_fsdp_osd.storage.transfer import Stats

__all__ = ["latest"]


def latest(
    path_or_url: str | os.PathLike[str],
    *,
    backend: Backend = "auto",
    storage_options: Mapping[str, Any] | None = None,
) -> str | None:
    """The path or URL of the newest committed checkpoint in a folder of checkpoints; None if none.

    Checkpoints are the folders directly below `path_or_url` that hold a ``.metadata``; the newest
    is the one whose ``.metadata`` was written last.  Where the clock does not tell (S3 counts in
    seconds), the greater name is newer, numbers in it compared as numbers: step-100 after step-20.
    Half-written folders are not seen.  The arguments are those of ``StreamingReader``.
    """
    session = make_session(path_or_url, backend=backend, storage_options=storage_options)
    try:
        found = session.call(session.store.commits, "list", Stats())
    finally:
        session.close()
    if not found:
        return None
    newest = max(found, key=lambda commit: (int(commit.modified), _natural(commit.folder)))
    return join(os.fspath(path_or_url), newest.folder)


def _natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts the numbers in names as numbers."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
