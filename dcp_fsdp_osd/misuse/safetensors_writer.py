"""A save plan that ``HuggingFaceStorageWriter`` would write a part of, and say nothing."""

from __future__ import annotations

from collections import Counter

from torch.distributed.checkpoint.planner import SavePlan, WriteItemType

from dcp_fsdp_osd.errors import LayoutError, listed

__all__ = ["check_safetensors"]

_ITS_DATA = {"shard_index", "fqn_to_index_mapping"}


def check_safetensors(plan: SavePlan) -> None:
    """Raise LayoutError if `plan` is for that writer, and not one whole piece for each name.

    Its files are safetensors, with one tensor for each name and no objects: of several pieces of
    one tensor, which FSDP1's flat parameters are cut into, the last stays, and objects are left
    out.  What it puts into a plan tells that it is the writer.
    """
    if not isinstance(plan.storage_data, dict) or not plan.storage_data.keys() <= _ITS_DATA:
        return
    pieces = Counter(item.index.fqn for item in plan.items)
    several = [f"{fqn}: {count} pieces" for fqn, count in pieces.items() if count > 1]
    objects = [item.index.fqn for item in plan.items if item.type == WriteItemType.BYTE_IO]
    if several or objects:
        raise LayoutError(
            "expected at most one piece of each tensor on a rank, and no objects, which is what "
            "HuggingFaceStorageWriter can keep, found\n  "
            + listed([*several, *(f"{fqn}: an object" for fqn in objects)])
            + "\nSave with StreamingWriter, and make safetensors of that with `dcp-osd export`"
        )
