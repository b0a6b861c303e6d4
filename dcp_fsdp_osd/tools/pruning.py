"""Delete old checkpoints by the rules of ``CheckpointManager``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dcp_fsdp_osd.errors import CorruptCheckpointError, StorageError, UnsafeCheckpointError
from dcp_fsdp_osd.manager.steps import Retention, Steps
from dcp_fsdp_osd.storage.latest import commits
from dcp_fsdp_osd.storage.redact import display_url
from dcp_fsdp_osd.storage.session import make_session
from dcp_fsdp_osd.storage.store import Backend
from dcp_fsdp_osd.tools.describe import entry_infos, file_bytes
from dcp_fsdp_osd.tools.opened import Checkpoint

__all__ = ["Pruning", "prune"]


@dataclass(frozen=True)
class Pruning:
    """What was deleted, or would be.

    Attributes:
        url: fit to be shown.
        kept, deleted: steps, ascending.
        damaged: step -> why its checkpoint stands for none that is kept.
        dry_run: nothing was deleted.
    """

    url: str
    kept: tuple[int, ...]
    deleted: tuple[int, ...]
    damaged: Mapping[int, str]
    dry_run: bool


def prune(
    path_or_url: str | os.PathLike[str],
    *,
    keep: int,
    every: int | None = None,
    dry_run: bool = False,
    backend: Backend = "auto",
    storage_options: Mapping[str, Any] | None = None,
) -> Pruning:
    """Delete all checkpoints ``step-<n>`` below a place but the newest `keep` good ones, and those
    of steps that `every` divides.

    A checkpoint is good if its metadata can be read and all of its files are there, of the length
    that they should have.  What is newer than the newest good one is left alone; where none is
    good, nothing is deleted.  Of each the ``.metadata`` goes first, so that whatever ends this
    leaves no checkpoint of which a part is gone.

    Raises:
        ValueError: `keep` or `every` is less than 1.
        StorageError: the place does not exist, or storage fails.
    """
    if keep < 1 or (every is not None and every < 1):
        raise ValueError(f"expected keep and every to be 1 at least, found {keep} and {every}")
    steps = Steps(path_or_url, {"backend": backend, "storage_options": storage_options})
    with contextlib.closing(
        make_session(path_or_url, backend=backend, storage_options=storage_options)
    ) as session:
        commits(session)  # a mistyped place is an error, and not an empty one
    committed = steps.committed()
    options: dict[str, Any] = {"backend": backend, "storage_options": storage_options}
    damaged: dict[int, str] = {}
    good: list[int] = []
    for step in reversed(committed):
        if len(good) >= keep and not (every and step % every == 0):
            continue  # it goes, whatever it is
        problem = _problem(steps.at(step), options)
        if problem is None:
            good.append(step)
        else:
            damaged[step] = problem
    gone: list[int] = []
    if good:
        gone = Retention(keep, every).obsolete(committed, good[0], damaged)
    if not dry_run:
        for step in gone:
            steps.remove(step)
    kept = tuple(step for step in committed if step not in set(gone))
    return Pruning(display_url(steps.url), kept, tuple(gone), damaged, dry_run)


def _problem(url: str, options: Mapping[str, Any]) -> str | None:
    """Why a checkpoint cannot be good, by its metadata and its files' lengths."""
    try:
        with Checkpoint(url, **options) as checkpoint:
            sizes = checkpoint.sizes()
            for name, size in file_bytes(entry_infos(checkpoint)).items():
                if sizes.get(name, 0) < size:
                    there = f"{sizes[name]} bytes" if name in sizes else "no such file"
                    return f"{name}: expected {size} bytes, found {there}"
    except (CorruptCheckpointError, UnsafeCheckpointError) as error:
        return str(error)
    except StorageError as error:
        # Only what is certain is damage: storage that does not answer says nothing.
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
        return str(error)
    return None
