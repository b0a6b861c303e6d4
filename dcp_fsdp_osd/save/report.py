"""What a rank reports to the coordinator, and what it gets back: names and boxes, no tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.checkpoint.metadata import MetadataIndex

from dcp_fsdp_osd.checkpoint import SavedInfo
from dcp_fsdp_osd.containers import Containers
from dcp_fsdp_osd.layout.geometry import Box
from dcp_fsdp_osd.lowbit.save import QuantizedReport

__all__ = ["GroupInfo", "Report", "Share"]


@dataclass(frozen=True)
class GroupInfo:
    """One param group of one rank: its FQNs, and a digest of each option's value."""

    fqns: tuple[str, ...]
    options: Mapping[str, str]


@dataclass
class Report:
    """One rank's part of one optimizer, or model, but for its tensors; travels with its local plan.

    Made as a state dict is taken apart (:mod:`~dcp_fsdp_osd.save.entries`); what all ranks agree on
    comes out of their reports, what is recorded out of their ``info``.

    Attributes:
        info: what is recorded of this rank's part.
        pieces: key of a tensor that is written as boxes -> FQN.
        stateless: FQN -> intervals that this rank holds but has no state for.
        orders: FQN -> memory order, where it is not row-major.
        parts: FQN -> the box that tensor parallelism leaves this rank and its FSDP group of it.
        shard_groups: FQN -> which FSDP group this rank is of (``ParamLayout.shard_group``).
        groups: this rank's param groups, in its order.
        per_rank_of: keys that per-rank state would have if it were none.
        empties: for each parameter without elements here: key of each state of it (per-rank state)
            -> the key that others have it under.
        heads: FQN -> first FQN of its flat parameter.
        containers: the mappings below the optimizer that are not dicts with text for keys.
        scalars: key of a value that is to be the same on all ranks -> digest.
        replicas: key of a tensor like its parameter, and the part that this rank holds as others
            may -> digest.
        quantized: what of the state is quantized in blocks.
        signature: of the layout.
        depth: of the optimizer's path.
        model: of a model, which has no groups and whose values may differ.
    """

    info: SavedInfo = field(default_factory=SavedInfo)
    pieces: dict[str, str] = field(default_factory=dict)
    stateless: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    orders: dict[str, tuple[int, ...]] = field(default_factory=dict)
    parts: dict[str, Box] = field(default_factory=dict)
    shard_groups: dict[str, int] = field(default_factory=dict)
    groups: list[GroupInfo] = field(default_factory=list)
    per_rank_of: list[str] = field(default_factory=list)
    empties: list[dict[str, str]] = field(default_factory=list)
    heads: dict[str, str] = field(default_factory=dict)
    containers: Containers = field(default_factory=Containers)
    scalars: dict[str, str] = field(default_factory=dict)
    replicas: dict[str, str] = field(default_factory=dict)
    quantized: QuantizedReport = field(default_factory=dict)
    signature: str = ""
    depth: int = 1
    model: bool = False


@dataclass
class Share:
    """A rank's share of the global plan, where it is not what the rank offered; travels with it.

    Attributes:
        renamed: key to write -> key on this rank.
        values: key to write -> value, of what no rank has.
        zeros: what no rank has, and is zeros.
    """

    renamed: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    zeros: set[MetadataIndex] = field(default_factory=set)
