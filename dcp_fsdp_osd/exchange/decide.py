"""Whether and what a load's ranks read for one another: the planner's side of the exchange.

Every rank describes its reads in its local plan (:func:`describe`); the coordinator decides and
plans for all (:func:`plan_reads`); each rank then begins its part (:meth:`SharedReads.begin`).
"""

from __future__ import annotations

import socket
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from dcp_fsdp_osd.compact import no_collections, packed, unpacked
from dcp_fsdp_osd.compat import job_store
from dcp_fsdp_osd.errors import CheckpointMismatchError
from dcp_fsdp_osd.exchange.messages import RankSchedule
from dcp_fsdp_osd.exchange.reads import SentItems, in_order
from dcp_fsdp_osd.exchange.regions import Participant
from dcp_fsdp_osd.exchange.schedule import plan_exchange
from dcp_fsdp_osd.exchange.transport import Channels
from dcp_fsdp_osd.exchange.worker import Exchange
from dcp_fsdp_osd.storage.location import is_local

__all__ = ["Broadcast", "RankReads", "SharedReads", "about_reader", "describe", "plan_reads"]

Broadcast = bool | Literal["auto"]

WORTHWHILE_BYTES = 8 << 20
"""Fewer bytes than these are sooner read again than broadcast."""


@dataclass(frozen=True)
class RankReads:
    """What a local plan says of its rank, for :func:`plan_reads`.

    ``places`` are ``dtypes`` and ``cuda``, packed; these and ``digest`` as of
    :class:`~dcp_fsdp_osd.exchange.regions.Participant`.
    ``spread``: other ranks may read for rank 0, which alone wants anything.
    """

    rank: int
    host: str
    broadcast: Broadcast
    spread: bool
    places: bytes
    digest: bytes

    def read_places(self) -> tuple[tuple[torch.dtype | None, ...], tuple[bool, ...]]:
        found: tuple[Any, Any] = unpacked(self.places)
        return found


@dataclass(frozen=True)
class SharedReads:
    """One rank's part of what was agreed; travels with its plan.

    Attributes:
        session: names this load's exchange, and no other's.
    """

    schedule: RankSchedule
    session: str

    def begin(
        self,
        items: Sequence[ReadItem],
        resolve: Callable[[ReadItem], torch.Tensor],
        stall_seconds: float,
    ) -> Exchange:
        """Connect with the other participants (collective over them); not started yet.

        ``items`` are those of :func:`describe`.
        """
        channels = Channels(
            job_store(),
            self.session,
            number=self.schedule.number,
            size=len(self.schedule.ranks),
            timeout=stall_seconds,
        )
        return Exchange(
            self.schedule,
            items,
            resolve,
            channels,
            stall_seconds=stall_seconds,
        )

    def own_reads(self, items: Sequence[ReadItem]) -> list[ReadItem]:
        """What this rank reads for itself alone."""
        alone = self.schedule.alone
        kept = [item for n, item in enumerate(items) if n not in alone]
        return kept + [part.of(items) for parts in alone.values() for part in parts]


def describe(
    items: Sequence[ReadItem],
    place: Callable[[ReadItem], tuple[torch.dtype | None, torch.device]],
    broadcast: Broadcast,
    spread: bool,
) -> RankReads:
    """This rank's ``items``, in the order of :func:`~dcp_fsdp_osd.exchange.reads.in_order`.

    ``place`` gives the dtype and device that an item is read to.
    """
    connected = dist.is_available() and dist.is_initialized()
    nccl = connected and "nccl" in dist.get_backend_config()
    if broadcast == "auto" and not connected:
        broadcast = False
    if not connected or dist.get_world_size() == 1:
        items = ()  # there is nobody to read for
    places = [place(item) for item in items]
    dtypes = tuple(dtype for dtype, _ in places)
    cuda = tuple(nccl and device.type == "cuda" for _, device in places)
    return RankReads(
        rank=dist.get_rank() if connected else 0,
        host=socket.gethostname(),
        broadcast=broadcast,
        spread=spread,
        places=packed((dtypes, cuda)),
        digest=Participant.digest_of(items, dtypes, cuda),
    )


def plan_reads(
    plans: Sequence[LoadPlan], reports: Sequence[RankReads], metadata: Metadata
) -> list[SharedReads] | None:
    """Decide for all ranks; None if each is to read for itself.

    With ``"auto"`` on every rank, what several want is read once where that spares 8 MiB at
    least, and the checkpoint is not a local path of the one machine that all are on: there, the
    page cache serves every rank faster than another rank can. (A path that several machines see
    is a network file system.) Where a reader cannot read at all, others read for it whatever is
    asked.

    Raises:
        CheckpointMismatchError: a storage reader changed the items of a plan (their order aside),
            and what is to be shared was asked for.
    """
    readers = [about_reader(plan) for plan in plans]
    able = [bool(about.get("can_read", True)) for about in readers]
    settings = [report.broadcast for report in reports]
    if len(plans) < 2 or (False in settings and all(able)):
        return None
    asked = True in settings or not all(able)
    if not asked and not _is_far(readers, metadata, len({report.host for report in reports})):
        return None
    participants, changed = _participants(plans, reports, able)
    if changed is not None:
        if not asked:
            return None
        raise CheckpointMismatchError(
            f"rank {changed}: expected a storage reader that reads what the planner asked for, "
            f"found that it changed the items of the plan: pass broadcast=False"
        )
    spread = any(report.spread for report in reports)
    with no_collections():  # millions of small values for thousands of ranks
        plan = plan_exchange(
            participants,
            metadata,
            reads_parts=all(about.get("reads_parts", False) for about in readers),
            spread=spread,
        )
    if plan is None:
        return None
    if not asked and max(plan.spared, plan.unique if spread else 0) < WORTHWHILE_BYTES:
        return None
    session = uuid.uuid4().hex
    return [SharedReads(schedule, session) for schedule in plan.ranks]


def _participants(
    plans: Sequence[LoadPlan], reports: Sequence[RankReads], able: Sequence[bool]
) -> tuple[list[Participant], int | None]:
    """All ranks; and the first, if any, of which the plan is not what it reported."""
    found: list[Participant] = []
    of_digest: dict[bytes, tuple[Any, ...]] = {}
    for plan, report, can_read in zip(plans, reports, able, strict=True):
        if report.digest not in of_digest:
            dtypes, cuda = report.read_places()
            items: Sequence[ReadItem] = plan.items
            if len(items) != len(dtypes):
                return found, report.rank
            if not (isinstance(items, SentItems) and items.proposed):
                items = in_order(items)
                if Participant.digest_of(items, dtypes, cuda) != report.digest:
                    return found, report.rank
            of_digest[report.digest] = items, dtypes, cuda
        items, dtypes, cuda = of_digest[report.digest]
        if len(plan.items) != len(items):
            return found, report.rank
        found.append(
            Participant(report.rank, report.host, can_read, items, dtypes, cuda, report.digest)
        )
    return found, None


def about_reader(plan: LoadPlan) -> dict[str, Any]:
    """What the rank's storage reader says of itself; nothing, if it is not one of ours."""
    data = plan.storage_data
    about = data.get("dcp_fsdp_osd") if isinstance(data, dict) else None
    return about if isinstance(about, dict) else {}


def _is_far(readers: Sequence[dict[str, Any]], metadata: Metadata, hosts: int) -> bool:
    """Whether the checkpoint is elsewhere than on the one machine that all ranks are on."""
    remote = any(about.get("remote", False) for about in readers)
    if not any(readers):  # a third party's: all that is known is where the checkpoint was saved
        saved_at = str(getattr(metadata.storage_meta, "checkpoint_id", None) or "")
        remote = not is_local(saved_at)
    return remote or hosts > 1
