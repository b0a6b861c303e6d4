"""What storage refuses for planners that take FSDP1's flat pieces for whole tensors.

The one place in which storage knows of optimizers: a stock planner is not ours to change, but its
plans and its questions to the metadata pass through here.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.planner import SavePlan

from dcp_fsdp_osd.errors import CheckpointMismatchError, LayoutError

__all__ = ["Entries", "check_flat_pieces"]

_NUMBERED = re.compile(r"(.+?)\.state\.\d+\.")
_GUARD = ".__needs_FlatOptim"  # begins the key of a Stateful's guard


def check_flat_pieces(plan: SavePlan) -> None:
    """Refuse a stock planner's plan to save ``optim.state_dict()`` of FSDP1.

    Under numbers FSDP1 has 1-D pieces, of which the checkpoint would keep one rank's. Whole
    tensors under numbers (DDP) are none of ours, and pass if any has another shape than 1-D.

    Raises:
        LayoutError: names the key, and the planner that saves it.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return
    paths = plan.planner_data
    if not isinstance(paths, Mapping):  # our own planner's
        return
    optims = {key for name in paths if (key := name.partition(".param_groups.")[0]) != name}
    dims: dict[str, set[int]] = {}
    for item in plan.items:
        match = _NUMBERED.match(item.index.fqn)
        if match is None or match[1] not in optims or item.tensor_data is None:
            continue
        path = paths.get(item.index.fqn, ())
        if not any(a == "state" and str(b).isdigit() for a, b in itertools.pairwise(path)):
            continue  # the name of a parameter begins with a number
        dims.setdefault(match[1], set()).add(len(item.tensor_data.size))
    for key, found in dims.items():
        if found - {0} == {1}:
            raise LayoutError(
                f"expected whole tensors, found that {key!r} is an optimizer's state dict with "
                f"numbers for keys and 1-D tensors for values, as FSDP1 has them: of each, one "
                f"rank's piece would be saved as the whole. Pass "
                f"planner=FlatOptimSavePlanner(model, optim) to dcp.save, which saves the state of "
                f"any model"
            )


class Entries(dict[str, Any]):
    """``Metadata.state_dict_metadata``; asked for an optimizer's state under numbers, where the
    checkpoint has it under names, it tells what the caller must do.

    Only a planner that is not ours asks so.
    """

    def __contains__(self, key: object) -> bool:
        if super().__contains__(key):
            return True
        if isinstance(key, str):
            self._check(key)
        return False

    def _check(self, key: str) -> None:
        match = _NUMBERED.match(key)
        owner = match[1] if match is not None else key.partition(_GUARD)[0]
        if owner == key:
            return
        saved = [name for name in self if name.startswith(f"{owner}.")]
        by_name = any(name.startswith(f"{owner}.param_groups") for name in saved)
        by_number = any(_NUMBERED.match(name) for name in saved)
        if _GUARD in key or (by_name and not by_number):
            raise CheckpointMismatchError(
                f"expected the names of parameters, found that {owner!r} is to be loaded into "
                f"one rank's pieces of flat tensors ({key!r}), which DCP's default planner cannot "
                f"do: pass planner=FlatOptimLoadPlanner(model, optim) to dcp.load, and tell it the "
                f"key"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)
