"""Empty dicts in a state dict that is loaded: DCP reads what has keys, so they stay empty, and what
takes them (``scheduler.load_state_dict({})``) may not say a word."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from dcp_fsdp_osd.errors import CheckpointMismatchError, several
from dcp_fsdp_osd.tree import Path, dicts, dotted

__all__ = ["check_filled"]


def check_filled(
    state_dict: Mapping[str, Any], taken: Collection[Path], metadata: Metadata, *, strict: bool
) -> list[str]:
    """One line for each empty dict in ``state_dict`` of which the checkpoint has entries.

    Args:
        taken: where a planner fills dicts itself.

    Raises:
        CheckpointMismatchError: there are some, and `strict`.
    """
    lines = []
    for path, value in sorted(dicts(state_dict), key=lambda each: each[0]):
        if value or any(path[:n] in taken for n in range(1, len(path) + 1)):
            continue
        where = f"{dotted(path)}."
        names = [name for name in metadata.state_dict_metadata if name.startswith(where)]
        if names:
            lines.append(
                f"{where[:-1]}: an empty dict, which DCP leaves empty; the checkpoint has "
                f"{several(names, 3)}"
            )
    if lines and strict:
        listed = "\n  ".join(lines)
        raise CheckpointMismatchError(
            f"expected something to load into, found empty dicts:\n  {listed}\nPut the live state "
            f"there (scheduler.state_dict(), or the scheduler itself), or leave the key out if it "
            f"is not to be loaded"
        )
    return lines
