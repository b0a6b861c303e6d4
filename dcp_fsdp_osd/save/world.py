"""All ranks' local plans, as they were sent; ranks of one shape are read once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from dcp_fsdp_osd.compact import Lazy
from dcp_fsdp_osd.save.wire import DIGEST, Common, KeptEntries, LocalData, Own, Sent

__all__ = ["World"]


class World:
    """All ranks' plans, as they were sent.

    Attributes:
        sent, own: by rank.
        shape: by rank: the number of its common part.
        commons: the common parts.
        kinds: ranks whose common parts and digests are equal, but for those of replicas: the lowest
            and the highest of them.
        kind: by rank.
    """

    def __init__(self, sent: Sequence[Sent]) -> None:
        self.sent = sent
        self.commons: list[Common] = []
        self.shape: list[int] = []
        self.own: list[Own] = []
        self.kind: list[int] = []
        self.kinds: list[tuple[int, int]] = []
        shapes: dict[bytes, int] = {}
        known: dict[tuple[int, bytes], int] = {}
        counts: list[int] = []
        for rank, each in enumerate(sent):
            shape = shapes.setdefault(each.common, len(self.commons))
            if shape == len(self.commons):
                common = each.read_common()
                self.commons.append(common)
                counts.append(DIGEST * sum(1 for _ in common.data.digests()))
            self.shape.append(shape)
            self.own.append(each.read_own(self.commons[shape]))
            digests = each.read_digests()[: counts[shape]]
            kind = known.setdefault((shape, digests), len(self.kinds))
            self.kind.append(kind)
            if kind == len(self.kinds):
                self.kinds.append((rank, rank))
            self.kinds[kind] = self.kinds[kind][0], rank

    def data(self, rank: int) -> LocalData:
        return self.sent[rank].data(self.commons[self.shape[rank]], self.own[rank])

    def samples(self) -> list[LocalData]:
        """Of the lowest rank of each kind."""
        return [self.data(first) for first, _ in self.kinds]

    def items(self, rank: int) -> list[list[WriteItem]]:
        return self.sent[rank].items(self.commons[self.shape[rank]], self.own[rank])

    def lazy_items(self, rank: int, kept: KeptEntries) -> Any:
        """What ``rank`` is to write, to whom looks."""
        return Lazy(lambda: kept.of(self.items(rank)))

    def plan(self, rank: int, sent: SavePlan) -> SavePlan:
        """The local plan of ``rank``, item by item."""
        items = [item for each in self.items(rank) for item in each]
        return dataclasses.replace(sent, items=items, planner_data=self.data(rank))
