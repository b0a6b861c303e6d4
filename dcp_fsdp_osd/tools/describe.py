"""What a checkpoint holds, from its metadata alone: entries, files, and how it was saved."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from dcp_fsdp_osd.checkpoint import INFO_KEY, SavedInfo
from dcp_fsdp_osd.errors import FlatOptimError, StorageError
from dcp_fsdp_osd.storage.identity import identify
from dcp_fsdp_osd.storage.metadata import EntryInfo, entry_info
from dcp_fsdp_osd.tools.opened import Checkpoint
from dcp_fsdp_osd.tree import Path

__all__ = [
    "Description",
    "OptimDescription",
    "Row",
    "describe",
    "entry_infos",
    "file_bytes",
    "fqn_and_state",
    "matching",
    "rank_of_file",
]

_OF_RANK = re.compile(r"__(\d+)_")


@dataclass(frozen=True)
class Row:
    """One entry of the state dict.

    Attributes:
        key: its name in the flattened state dict.
        fqn, state: the parameter (or buffer), and the optimizer's state or option of it; as far as
            the recorded path tells.
        kind: ``"tensor"`` or ``"object"``.
        dtype, shape: of a tensor; empty for objects.
        nbytes: of a tensor's elements; of an object as it is stored.
        chunks: boxes that a tensor is stored in; 1 for objects.
        files: that hold them.
    """

    key: str
    fqn: str
    state: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    chunks: int
    files: tuple[str, ...]


@dataclass(frozen=True)
class OptimDescription:
    """What our save planner recorded of one optimizer.

    Attributes:
        key: where it lies in the state dict.
        classes: class names, one unless ranks differed.
        groups: number of parameters of each param group; None if it was not recorded.
        layouts: how many different layouts the ranks had; None if it was not recorded.
        per_rank: entries of state that loads only where a rank has the same part of the model.
        absent: entries with elements that had no state when they were saved (stored as zeros).
    """

    key: str
    classes: tuple[str, ...]
    groups: tuple[int, ...] | None
    layouts: int | None
    per_rank: int
    absent: int


@dataclass(frozen=True)
class Description:
    """A checkpoint, as its metadata tell.

    Attributes:
        url: fit to be shown.
        writer: ``"dcp-fsdp-osd"``, or ``"torch.distributed.checkpoint"`` for anybody else's.
        save: an id of this save.
        saved_at: the place that it was saved at, where that is known.
        checksum: algorithm of its checksums; None where it has none.
        ranks: how many ranks wrote files, where names of files tell.
        files: bytes by name, up to the last entry's end.
        optimizers: as far as our planner recorded them.
        rows: all entries, or those asked for.
        entries: how many entries there are in all.
    """

    url: str
    writer: str
    save: str
    saved_at: str
    checksum: str | None
    ranks: int | None
    files: Mapping[str, int]
    optimizers: tuple[OptimDescription, ...]
    rows: tuple[Row, ...]
    entries: int
    notes: tuple[str, ...] = field(default=())

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(self.files.values())


def entry_infos(checkpoint: Checkpoint) -> list[tuple[MetadataIndex, EntryInfo]]:
    """Where each entry lies.

    Raises:
        CorruptCheckpointError, UnsafeCheckpointError: the metadata describe no entry.
    """
    names: set[str] = set()
    return [
        (index, entry_info(info, index.fqn, names))
        for index, info in checkpoint.metadata.storage_data.items()
    ]


def file_bytes(entries: Iterable[tuple[MetadataIndex, EntryInfo]]) -> dict[str, int]:
    """Bytes of each file, up to its last entry's end."""
    files: dict[str, int] = {}
    for _, info in entries:
        files[info.name] = max(files.get(info.name, 0), info.offset + info.length)
    return files


def matching(keys: Iterable[str], globs: Iterable[str]) -> list[str]:
    """The keys that any of `globs` (``*``, ``?``, ``[abc]``) or a whole name matches; all for none.

    A name also stands for all that lies below it.
    """
    patterns = list(globs)
    if not patterns:
        return list(keys)
    return [
        key
        for key in keys
        if any(
            key == pattern or key.startswith(f"{pattern}.") or fnmatch.fnmatchcase(key, pattern)
            for pattern in patterns
        )
    ]


def describe(checkpoint: Checkpoint, globs: Iterable[str] = ()) -> Description:
    """What is in a checkpoint; of the entries those whose keys match any of `globs`, if given.

    Raises:
        CorruptCheckpointError: the metadata make no sense.
    """
    of_key: dict[str, dict[str, int]] = {}
    entries = entry_infos(checkpoint)
    files = file_bytes(entries)
    for index, info in entries:
        held = of_key.setdefault(index.fqn, {})
        held[info.name] = held.get(info.name, 0) + info.length
    wanted = matching(checkpoint.entries, globs)
    if globs and not wanted:
        raise StorageError(
            f"{checkpoint.url}: none of its {len(checkpoint.entries)} entries matches "
            f"{', '.join(map(repr, globs))}"
        )
    meta = getattr(checkpoint.metadata, "storage_meta", None)
    ours = hasattr(checkpoint.metadata, "dcp_fsdp_osd")
    optimizers, notes = _optimizers(checkpoint)
    return Description(
        url=checkpoint.url,
        writer="dcp-fsdp-osd" if ours else "torch.distributed.checkpoint",
        save=identify(checkpoint.metadata).save or "",
        saved_at=str(getattr(meta, "checkpoint_id", None) or ""),
        checksum=checkpoint.checksum,
        ranks=_ranks(files),
        files=dict(sorted(files.items())),
        optimizers=optimizers,
        rows=tuple(_row(checkpoint, key, of_key.get(key, {})) for key in sorted(wanted)),
        entries=len(checkpoint.entries),
        notes=notes,
    )


def rank_of_file(name: str) -> int | None:
    """The rank that wrote a file, where its name tells."""
    found = _OF_RANK.match(name)
    return int(found[1]) if found else None


def _ranks(files: Iterable[str]) -> int | None:
    known = set(map(rank_of_file, files))
    return len(known) if known and None not in known else None


def _row(checkpoint: Checkpoint, key: str, held: Mapping[str, int]) -> Row:
    stored = checkpoint.entries[key]
    fqn, state = fqn_and_state(checkpoint.path(key))
    files = tuple(sorted(held))
    if not isinstance(stored, TensorStorageMetadata):
        return Row(key, fqn, state, "object", "", (), sum(held.values()), 1, files)
    return Row(
        key,
        fqn,
        state,
        "tensor",
        str(stored.properties.dtype).removeprefix("torch."),
        checkpoint.shape(key),
        checkpoint.nbytes(key),
        len(stored.chunks),
        files,
    )


def fqn_and_state(path: Path) -> tuple[str, str]:
    """Parameter and state of a path such as ``("optim", "state", fqn, "exp_avg")``."""
    texts = [str(step) for step in path]
    for at, step in enumerate(texts[:-1]):
        if step == "state":
            return texts[at + 1], ".".join(texts[at + 2 :])
        if step == "param_groups":
            return "", ".".join(texts[at + 2 :])
    return ".".join(texts[1:] or texts), ""


def _optimizers(
    checkpoint: Checkpoint,
) -> tuple[tuple[OptimDescription, ...], tuple[str, ...]]:
    planner_data: Any = checkpoint.metadata.planner_data
    if not isinstance(planner_data, Mapping) or INFO_KEY not in planner_data:
        return (), ()
    found, notes = [], []
    for key in _keys(checkpoint):
        try:
            info = SavedInfo.unpack(planner_data, key)
        except FlatOptimError as error:
            notes.append(str(error))
            break
        if info is not None:
            found.append(
                OptimDescription(
                    key,
                    tuple(str(each.get("class", "?")) for each in info.optimizers),
                    None if info.groups is None else tuple(map(len, info.groups)),
                    None if info.layouts is None else len(set(info.layouts)),
                    len(info.opaque),
                    len(info.absent),
                )
            )
    return tuple(found), tuple(notes)


def _keys(checkpoint: Checkpoint) -> list[str]:
    """Where optimizers may lie: what is above ``state`` and ``param_groups`` in recorded paths."""
    keys: dict[str, None] = {}
    for key in checkpoint.entries:
        texts = [str(step) for step in checkpoint.path(key)]
        for at, step in enumerate(texts):
            if step in ("state", "param_groups") and at:
                keys[".".join(texts[:at])] = None
                break
    return list(keys)
