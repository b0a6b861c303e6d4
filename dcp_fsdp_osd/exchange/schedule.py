"""Who reads what for whom, and in which order it is broadcast.  Pure: no IO, no process group.

:func:`plan_exchange` takes all ranks' reads and gives each rank its part of one schedule.  It is a
function of its arguments alone, so the same reads give the same schedule anywhere; DCP's
coordinator calls it in ``create_global_plan`` and DCP hands each rank its part with the plan.

Everything that one set of ranks wants alike is a *stream* of bytes, in file order, cut into equal
runs, one for each rank that reads of it: bytes are balanced, files have few readers, large tensors
are cut and small ones come together by construction (:mod:`dcp_fsdp_osd.exchange.rounds`).

Where storage readers can only read a saved chunk whole, and ranks want different regions of it, one
rank reads it once, into memory of its own, and sends each its region.

How it compares: torch's ``load_planner`` has every rank read all that it wants;
ByteCheckpoint (arXiv 2407.20143, section 4.1) also reads once, and then sends tensor by tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch.distributed.checkpoint.metadata import Metadata

from dcp_fsdp_osd.compact import Numbers
from dcp_fsdp_osd.exchange.assembly import Assembly
from dcp_fsdp_osd.exchange.messages import RankSchedule
from dcp_fsdp_osd.exchange.reads import Ints, box_of
from dcp_fsdp_osd.exchange.regions import Classes, Participant, Regions, find_regions
from dcp_fsdp_osd.exchange.rounds import Chunk, Run, Sizes, Stream, chunk_steps, rounds, steps

__all__ = ["ExchangePlan", "plan_exchange"]

_SIZES = Sizes()


@dataclass(frozen=True)
class ExchangePlan:
    """The whole schedule.

    Attributes:
        ranks: one schedule for each participant.
        unique: bytes of tensors that are exchanged, each counted once.
        spared: bytes that need not be read from storage because of it.
    """

    ranks: tuple[RankSchedule, ...]
    unique: int
    spared: int


def plan_exchange(
    participants: Sequence[Participant],
    metadata: Metadata,
    *,
    reads_parts: bool,
    spread: bool = False,
    sizes: Sizes = _SIZES,
) -> ExchangePlan | None:
    """Plan to read once what several participants want; None if there is nothing of the kind.

    Args:
        participants: all ranks of the load, in the order of its process group.
        metadata: of the checkpoint.
        reads_parts: the storage readers read parts of a saved chunk for the cost of the part.
            Otherwise a chunk of which anything is exchanged is read whole, by one rank.
        spread: let all ranks read, also for others what they do not want themselves (with
            `reads_parts` alone).
        sizes: by how many bytes it is cut.  Objects are not: their sizes are not known yet.

    Raises:
        ValueError: something is wanted, and no participant can read.
    """
    classes = Classes(participants)
    regions = find_regions(classes, metadata)
    streams = _Streams(classes, regions, spread=spread and reads_parts)
    kind, first = _kinds(classes, regions)
    of_kind = [streams.of(region) for region in first]
    if not any(of_kind):
        return None
    shared = np.array([stream is not None for stream in of_kind])[kind]
    chunks = [] if reads_parts else _chunks(regions, shared, streams)
    whole = np.zeros(len(regions), bool)
    whole[[region for chunk in chunks for _, region in chunk.regions]] = True
    those = np.where(shared & ~whole, kind, -1)
    order = those.argsort(kind="stable")
    edges = those[order].searchsorted(np.arange(len(first) + 1)).tolist()
    filled = [
        (stream, Run.of(regions, order[a:b]))
        for stream, (a, b) in zip(of_kind, itertools.pairwise(edges), strict=True)
        if stream is not None and b > a
    ]
    queues = steps(filled, reads_parts, sizes) + chunk_steps(chunks, regions, sizes)
    assembly = Assembly(classes, regions, chunks, reads_parts)
    for drafts in rounds(queues, sizes.round):
        assembly.add_round(drafts)
    exchanged = shared | whole
    members = np.array([len(those) for those in classes.members])[classes.reads.plan]
    spared = np.add.reduceat(members[regions.owners], regions.begins) - 1
    return ExchangePlan(
        ranks=assembly.schedules(~exchanged),
        unique=int(regions.nbytes[exchanged].sum()),
        spared=int((regions.nbytes * spared)[exchanged].sum()),
    )


def _kinds(classes: Classes, regions: Regions) -> tuple[Ints, list[int]]:
    """Each region's kind: who wants it, and how; and the first region of each kind."""
    wanting = classes.reads.plan[regions.owners]
    owners = wanting[regions.begins]
    known: dict[bytes, int] = {}
    for region in (regions.counts > 1).nonzero()[0].tolist():
        begin = regions.begins[region]
        those = wanting[begin : begin + regions.counts[region]].tobytes()
        owners[region] = len(classes.members) + known.setdefault(those, len(known))
    each = owners * 4 + regions.cuda * 2 + regions.objects
    _, first, kind = np.unique(each, return_index=True, return_inverse=True)
    rank = np.empty_like(first)
    rank[first.argsort()] = range(len(first))
    return rank[kind], sorted(first.tolist())


class _Streams:
    """The streams of one exchange: what the same ranks want, of the same kind, is in one.

    Args:
        spread: all ranks that can read do, not only those that want something.
    """

    def __init__(self, classes: Classes, regions: Regions, *, spread: bool) -> None:
        self._classes, self._regions, self._spread = classes, regions, spread
        ranks = classes.participants
        self.readers = tuple(n for n, rank in enumerate(ranks) if rank.can_read)
        if not self.readers:
            raise ValueError("expected at least one rank that can read, found none")
        self._of_chunks: dict[object, Stream] = {}

    def of(self, region: int) -> Stream | None:
        """A stream for regions of one kind; None if who wants them reads them for itself alone."""
        wanting = self.wanting(region)
        able = self.readers if self._spread else self.able(wanting)
        if wanting == able and len(wanting) == 1:
            return None
        return self._stream(region, able, whole=False)

    def of_chunk(self, region: int, root: int) -> Stream:
        """The stream of a region of a chunk that ``root`` reads whole."""
        stream = self._stream(region, (root,), whole=True)
        return self._of_chunks.setdefault((stream.classes, root, stream.cuda), stream)

    def wanting(self, region: int) -> Numbers:
        return self._classes.wanting(self._owners(region))

    def able(self, wanting: Iterable[int]) -> tuple[int, ...]:
        """Those that can read, of ``wanting``; of all, if none of them can."""
        ranks = self._classes.participants
        return tuple(n for n in wanting if ranks[n].can_read) or self.readers

    def _owners(self, region: int) -> tuple[int, ...]:
        begin, count = self._regions.begins[region], self._regions.counts[region]
        owners = self._regions.owners[begin : begin + count]
        return tuple(self._classes.reads.plan[owners].tolist())

    def _stream(self, region: int, able: tuple[int, ...], *, whole: bool) -> Stream:
        ranks, regions = self._classes.participants, self._regions
        readers = tuple(sorted(able, key=lambda n: (ranks[n].host, n)))
        owners = self._owners(region)
        cuda, objects = bool(regions.cuda[region]), bool(regions.objects[region])
        return Stream(owners, self._classes.wanting(owners), readers, cuda, objects, whole)


def _chunks(regions: Regions, shared: npt.NDArray[np.bool_], streams: _Streams) -> list[Chunk]:
    """Chunks that ranks want different regions of, some of which are exchanged; in file order.

    Each is read by the one of those that want something of it who has least to read.
    """
    _, chunk, count = np.unique(regions.chunk, return_inverse=True, return_counts=True)
    some = (np.bincount(chunk, weights=shared) > 0) & (count > 1)
    of_chunk: dict[int, list[int]] = {}
    for region in some[chunk].nonzero()[0].tolist():
        of_chunk.setdefault(int(regions.chunk[region]), []).append(region)
    found: list[Chunk] = []
    load: dict[int, int] = {}
    for number, those in of_chunk.items():
        wanting = itertools.chain.from_iterable(map(streams.wanting, those))
        root = min(streams.able(wanting), key=lambda n: (load.get(n, 0), n))
        low = regions.offsets[those].min(0)
        high = (regions.offsets[those] + regions.sizes[those]).max(0)
        box = box_of(low, high - low)
        nbytes = box.numel * int(regions.itemsize[those[0]])
        load[root] = load.get(root, 0) + nbytes
        of_them = [(streams.of_chunk(region, root), region) for region in those]
        found.append(Chunk(root, number, box, nbytes, of_them))
    return found
