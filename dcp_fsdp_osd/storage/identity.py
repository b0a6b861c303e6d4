"""Which checkpoint a rank reads, so that ranks that read different ones find out.

Each rank reads the metadata for itself, and may find another save than its neighbours: because
``latest`` was asked while a save ended, or because a path is a folder of its own on every machine.
Every local plan carries what its rank found, and the coordinator, who sees all plans, compares.
Pure: no IO, no collective.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from dcp_fsdp_osd.errors import CheckpointMismatchError, listed, several
from dcp_fsdp_osd.storage.places import file_names

__all__ = ["Identity", "check_one_checkpoint", "identify"]


@dataclass(frozen=True)
class Identity:
    """What one rank reads.  Travels with its local plan.

    Attributes:
        save: equal on ranks that read the same save, wherever each finds it.  None where this rank
            reads metadata of its own, as a save without collectives leaves them.
        place: where it was saved, or where this rank finds it; for messages alone.
    """

    save: str | None
    place: str


def identify(metadata: Metadata) -> Identity:
    """The save that `metadata` is of.

    That is the id which DCP's writers and ours make for each save.  Where there is none (torch
    before 2.3, other writers), it is a digest of what was saved and of where it lies in the files;
    two steps of one job may have that in common.
    """
    meta = getattr(metadata, "storage_meta", None)
    place = str(getattr(meta, "checkpoint_id", None) or "a place that is not known")
    if _of_one_rank(metadata):
        return Identity(None, place)
    save_id = getattr(meta, "save_id", None)
    return Identity(str(save_id) if save_id else _digest(metadata), place)


def check_one_checkpoint(found: Sequence[Identity], ranks: Sequence[int] | None = None) -> None:
    """Raise if not all ranks read the same save; `ranks` are their numbers in messages.

    Raises:
        CheckpointMismatchError: says which ranks read what.
    """
    by_save: dict[str, list[int]] = {}
    for number, identity in enumerate(found):
        if identity.save is not None:
            by_save.setdefault(identity.save, []).append(number)
    if len(by_save) < 2:
        return
    lines = []
    for save, members in by_save.items():
        places = list(dict.fromkeys(found[number].place for number in members))
        who = [str(ranks[number] if ranks else number) for number in members]
        lines.append(
            f"rank{'s' if len(who) > 1 else ''} {several(who)}: save {save[:12]} at "
            f"{several(places)}"
        )
    raise CheckpointMismatchError(
        "the ranks do not load the same checkpoint:\n  "
        + listed(lines)
        + "\nPass the same one on all ranks, on storage that all of them see; "
        "latest(..., process_group=group) gives all ranks one answer"
    )


def _of_one_rank(metadata: Metadata) -> bool:
    """Whether all of its files are of one rank, and that is not the first: then it is that rank's
    own metadata (``use_collectives=False``), unlike any other rank's.
    """
    first = None
    for name in file_names(getattr(metadata, "storage_data", None)):
        found = re.match(r"__(\d+)_", name)
        if found is None or found[1] == "0" or (first or found[1]) != found[1]:
            return False
        first = found[1]
    return first is not None


def _digest(metadata: Metadata) -> str:
    found = hashlib.sha256()
    for key, value in sorted(metadata.state_dict_metadata.items()):
        chunks = [
            (tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in getattr(value, "chunks", ())
        ]
        dtype = getattr(getattr(value, "properties", None), "dtype", None)
        shape = tuple(getattr(value, "size", ()))
        found.update(repr((key, type(value).__name__, str(dtype), shape, chunks)).encode())
    entries = metadata.storage_data if isinstance(metadata.storage_data, Mapping) else {}
    lines = [
        repr(
            (
                index.fqn,
                tuple(index.offset or ()),
                getattr(info, "relative_path", None),
                getattr(info, "offset", None),
                getattr(info, "length", None),
            )
        )
        for index, info in entries.items()
        if isinstance(index, MetadataIndex)
    ]
    for line in sorted(lines):
        found.update(line.encode())
    return found.hexdigest()
