"""A checkpoint that cannot be read: one error that says what is there instead.

DCP answers an error of ``read_metadata`` with its traceback in the log, looks for metadata of this
rank alone, logs the traceback of that, and raises an AssertionError that quotes both.  So the
reader gives it :class:`Unreadable` metadata: the error comes when somebody looks at them, which is
the planner or, at the latest, ``set_up_storage_reader``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from dcp_fsdp_osd.storage.latest import natural
from dcp_fsdp_osd.storage.location import is_named, local_path, parent
from dcp_fsdp_osd.storage.opening import open_store
from dcp_fsdp_osd.storage.session import Session
from dcp_fsdp_osd.storage.transfer import bounded

__all__ = ["Unreadable", "look_around"]

_FIELDS = {field.name for field in dataclasses.fields(Metadata)}
_SECONDS = 10.0
_NAMED = 10


class Unreadable(Metadata):
    """Stands for metadata that could not be read: reading any field raises why.

    Args:
        explain: makes the error, when it is wanted.
        missing: there are none; False makes DCP look no further.
    """

    def __init__(self, explain: Callable[[], BaseException], *, missing: bool) -> None:
        vars(self).update(_explain=explain, _missing=missing)

    def __bool__(self) -> bool:
        return not vars(self)["_missing"]

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def __getattribute__(self, name: str) -> Any:
        if name in _FIELDS:
            # Without the frames of whoever tried to read: they say nothing.
            raise vars(self)["_explain"]().with_traceback(None)
        return super().__getattribute__(name)


def look_around(session: Session, *, beside: bool) -> str:
    """What is at a place that holds no checkpoint, for a message; empty if that takes too long.

    With `beside`, and the checkpoints below it and beside it.
    """
    try:
        return bounded(lambda: _look(session, beside), stall=_SECONDS, what="look around")
    except Exception:  # it is to explain an error, not to be one
        return ""


def _look(session: Session, beside: bool) -> str:
    said = [_at(session)]
    if beside:
        for what, url in (("below", session.config.url), ("beside", parent(session.config.url))):
            found = _checkpoints(session, url)
            if found:
                hint = "; pass one of them, or latest(...)" if what == "below" else ""
                said.append(f"Checkpoints {what} it: {_listed(found)}{hint}.")
    return " ".join(said)


def _at(session: Session) -> str:
    path = Path(local_path(session.config.url))
    if session.is_local and not path.is_dir():
        there = path.exists()
        return "that is a file, not a folder." if there else "the folder does not exist."
    try:
        return _files(session.store.sizes())
    except FileNotFoundError:
        return "the bucket or folder does not exist."


def _files(files: Collection[str]) -> str:
    ranks = [name for name in files if re.fullmatch(r"__\d+\.metadata", name)]
    if ranks:
        return (
            f"it holds metadata of single ranks ({_listed(ranks)}), as a save with "
            "use_collectives=False leaves them, and none of this rank."
        )
    if any(name.endswith(".distcp") for name in files):
        return (
            f"it holds {len(files)} files ({_listed(files)}) and no .metadata: a save there did "
            "not finish."
        )
    if files:
        return f"it holds no .metadata but {_listed(files)}, which are no checkpoint."
    return "nothing is there."


def _checkpoints(session: Session, url: str) -> list[str]:
    if not url:
        return []
    store = open_store(dataclasses.replace(session.config, url=url))
    try:
        found = [commit.folder for commit in store.commits()]
        return [folder for folder in found if is_named(url, folder)]
    except Exception:  # perhaps nobody may list there
        return []
    finally:
        store.close()


def _listed(names: Collection[str]) -> str:
    last = sorted(names, key=natural)[-_NAMED:]
    return (f"{len(names) - len(last)} more, " if len(last) < len(names) else "") + ", ".join(last)
