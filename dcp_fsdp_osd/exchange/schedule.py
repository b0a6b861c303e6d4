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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch.distributed.checkpoint.metadata import Metadata

from dcp_fsdp_osd.compact import Numbers
from dcp_fsdp_osd.exchange.assembly import Assembly
from dcp_fsdp_osd.exchange.messages import RankSchedule
from dcp_fsdp_osd.exchange.regions import Classes, Participant, Region, find_regions
from dcp_fsdp_osd.exchange.rounds import Chunk, Sizes, Stream, chunk_steps, rounds, steps
from dcp_fsdp_osd.layout.geometry import Box

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
    streams = _Streams(classes, spread=spread and reads_parts)
    regions = find_regions(classes, metadata)
    shared = [streams.of(region) for region in regions]
    if not any(shared):
        return None
    chunks = [] if reads_parts else _chunks(regions, shared, streams)
    in_chunks = {id(region) for chunk in chunks for _, region in chunk.regions}
    alone: list[Region] = []
    for region, stream in zip(regions, shared, strict=True):
        if id(region) in in_chunks:
            continue
        if stream is None:
            alone.append(region)
        else:
            stream.regions.append(region)
    filled = [stream for stream in streams if stream.regions]
    queues = steps(filled, reads_parts, sizes) + chunk_steps(chunks, sizes)
    assembly = Assembly(classes, chunks, reads_parts)
    for drafts in rounds(queues, sizes.round):
        assembly.add_round(drafts)
    left = {id(region) for region in alone}
    exchanged = [region for region in regions if id(region) not in left]
    return ExchangePlan(
        ranks=assembly.schedules(exchanged, alone),
        unique=sum(region.nbytes for region in exchanged),
        spared=sum(region.nbytes * (classes.count(region) - 1) for region in exchanged),
    )


class _Streams:
    """The streams of one exchange: what the same ranks want, of the same kind, is in one.

    Iteration gives them in the order in which they were first asked for.

    Args:
        spread: all ranks that can read do, not only those that want something.
    """

    def __init__(self, classes: Classes, *, spread: bool) -> None:
        self.classes, self._spread = classes, spread
        ranks = classes.participants
        self.readers = tuple(n for n, rank in enumerate(ranks) if rank.can_read)
        if not self.readers:
            raise ValueError("expected at least one rank that can read, found none")
        self._of: dict[object, Stream] = {}
        self._found: dict[object, Stream | None] = {}

    def __iter__(self) -> Iterator[Stream]:
        return iter(self._of.values())

    def of(self, region: Region) -> Stream | None:
        """The stream that a region belongs to; None if who wants it reads it for itself alone."""
        key = tuple(number for number, _ in region.owners), region.cuda, region.box is None
        if key not in self._found:
            self._found[key] = self._new(region)
        return self._found[key]

    def _new(self, region: Region) -> Stream | None:
        wanting = self.classes.wanting(region)
        able = self.able(wanting)
        if self._spread:
            able = self.readers
        if wanting == able and len(wanting) == 1:
            return None
        return self._stream(region, wanting, able, whole=False)

    def from_chunk(self, region: Region, root: int) -> Stream:
        """The stream of a region of a chunk that ``root`` reads whole."""
        return self._stream(region, self.classes.wanting(region), (root,), whole=True)

    def able(self, wanting: Iterable[int]) -> tuple[int, ...]:
        """Those that can read, of ``wanting``; of all, if none of them can."""
        ranks = self.classes.participants
        return tuple(n for n in wanting if ranks[n].can_read) or self.readers

    def _stream(
        self, region: Region, wanting: Numbers, able: tuple[int, ...], *, whole: bool
    ) -> Stream:
        ranks = self.classes.participants
        readers = tuple(sorted(able, key=lambda n: (ranks[n].host, n)))
        objects = region.box is None
        key = (wanting, readers, region.cuda, objects, whole)
        if key not in self._of:
            self._of[key] = Stream(wanting, readers, region.cuda, objects, whole)
        return self._of[key]


def _chunks(
    regions: Sequence[Region], shared: Sequence[Stream | None], streams: _Streams
) -> list[Chunk]:
    """Chunks that ranks want different regions of, some of which are exchanged; in file order.

    Each is read by the one of those that want something of it who has least to read.
    """
    of_chunk: dict[object, list[tuple[Region, Stream | None]]] = {}
    for region, stream in zip(regions, shared, strict=True):
        if region.box is not None:
            of_chunk.setdefault(region.chunk_key, []).append((region, stream))
    found: list[Chunk] = []
    load: dict[int, int] = {}
    for pairs in of_chunk.values():
        if len(pairs) == 1 or not any(stream for _, stream in pairs):
            continue
        those = [region for region, _ in pairs]
        wanting = itertools.chain.from_iterable(map(streams.classes.wanting, those))
        root = min(streams.able(wanting), key=lambda n: (load.get(n, 0), n))
        box = _around(those)
        load[root] = load.get(root, 0) + box.numel * those[0].itemsize
        found.append(Chunk(root, box, [(streams.from_chunk(each, root), each) for each in those]))
    return found


def _around(regions: Sequence[Region]) -> Box:
    """The smallest box that holds the boxes of all ``regions``."""
    boxes = [region.box for region in regions if region.box is not None]
    low = [min(each) for each in zip(*(box.offsets for box in boxes), strict=True)]
    ends = [[a + n for a, n in zip(box.offsets, box.sizes, strict=True)] for box in boxes]
    high = [max(each) for each in zip(*ends, strict=True)]
    return Box(tuple(low), tuple(b - a for a, b in zip(low, high, strict=True)))
