"""What each rank of a world would read of a checkpoint, before anyone rents the ranks.

From the checkpoint's metadata alone: layouts are simulated (``sharding.py``), and requests are
planned by the reader's own code (``reads.py``); nothing else is read.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dcp_fsdp_osd.compact import no_collections
from dcp_fsdp_osd.tools.opened import Checkpoint, Progress, no_progress
from dcp_fsdp_osd.tools.reads import Pace, Reads
from dcp_fsdp_osd.tools.sharding import Layout, Sharding

__all__ = ["Forecast", "RankForecast", "forecast"]

SAMPLE = 64
"""Ranks that are planned where there are more, unless all are asked for."""


@dataclass(frozen=True)
class RankForecast:
    """What one rank reads of tensors that are sharded.

    Attributes:
        nbytes: that it is sent, whole checksum blocks included.
        needed: bytes of the elements that it holds.
        requests, files: how many.
        seconds: by the forecast's bandwidth and latency.
    """

    rank: int
    nbytes: int
    needed: int
    requests: int
    files: int
    seconds: float


@dataclass(frozen=True)
class Forecast:
    """Of a load by `world_size` ranks.

    Attributes:
        url: fit to be shown.
        layout: ``"fsdp1"`` or ``"fsdp2"``.
        units: how many FSDP units the parameters were divided into.
        ranks: those that were planned, all or evenly spaced ones.
        metadata_nbytes: that each rank reads first (or one for all, with a `process_group`):
            with an index that alone.
        metadata_file_nbytes: of ``.metadata``, all of which stock DCP's readers read.
        shared_entries, shared_nbytes: objects, scalars and other state that is read once, and
            handed to all ranks.
        seconds: of the slowest rank.
        total_nbytes, total_requests: of all ranks; scaled up where not all were planned.
    """

    url: str
    world_size: int
    layout: str
    units: int
    ranks: tuple[RankForecast, ...]
    metadata_nbytes: int
    metadata_file_nbytes: int
    shared_entries: int
    shared_nbytes: int
    seconds: float
    total_nbytes: int
    total_requests: int

    def spread(self, name: str) -> tuple[float, float, float]:
        """Least, median and most over the planned ranks of a field of :class:`RankForecast`."""
        values = [getattr(each, name) for each in self.ranks]
        return min(values), statistics.median(values), max(values)


def forecast(
    checkpoint: Checkpoint,
    world_size: int,
    *,
    layout: Layout = "fsdp1",
    wrapped: Iterable[str] | None = None,
    bandwidth: float = 1e9,
    latency: float = 0.02,
    concurrency: int = 16,
    all_ranks: bool = False,
    progress: Progress = no_progress,
) -> Forecast:
    """Plan the load of all sharded tensors of a checkpoint, weights and optimizer state.

    A rank's time is that of its metadata, and then of its requests, `concurrency` at a time::

        latency * (1 + ceil(requests / concurrency)) + (metadata + bytes) / bandwidth

    Args:
        world_size: of the shard group.
        layout: FSDP1's flat pieces, or FSDP2's (``fully_shard``) rows.
        wrapped: modules that are FSDP units, or patterns of such (``layers.*``: a ``*`` is one
            name); by default the outermost modules with a number for a name. The root always is.
        bandwidth: bytes a second that one rank gets.
        latency: seconds of a request.
        all_ranks: plan each of them, also where they are more than :data:`SAMPLE`.

    Raises:
        ValueError: an argument is out of its range, or a pattern matches nothing.
        StorageError: the checkpoint has no tensor that is sharded.
    """
    pace = Pace(bandwidth, latency, concurrency)
    sharding = Sharding(checkpoint, world_size, layout=layout, wrapped=wrapped)
    reads = Reads(checkpoint, sharding.keys)
    numbers = _sampled(world_size, all_ranks=all_ranks)
    ranks = []
    with no_collections():  # of the many objects that live on
        for done, rank in enumerate(numbers):
            progress(done, len(numbers))
            planned = reads.plan(sharding.boxes(rank))
            nbytes = sum(fetch.end - fetch.start for fetch in planned.fetches)
            files = {fetch.name for fetch in planned.fetches}
            requests = len(planned.fetches)
            seconds = pace.seconds(requests, reads.metadata_nbytes + nbytes)
            ranks.append(RankForecast(rank, nbytes, planned.needed, requests, len(files), seconds))
    return Forecast(
        url=checkpoint.url,
        world_size=world_size,
        layout=layout,
        units=sharding.units,
        ranks=tuple(ranks),
        metadata_nbytes=reads.metadata_nbytes,
        metadata_file_nbytes=reads.metadata_file_nbytes,
        shared_entries=len(sharding.shared),
        shared_nbytes=sum(sharding.shared.values()),
        seconds=max(each.seconds for each in ranks),
        total_nbytes=_of_all([each.nbytes for each in ranks], world_size),
        total_requests=_of_all([each.requests for each in ranks], world_size),
    )


def _sampled(world_size: int, *, all_ranks: bool) -> list[int]:
    if all_ranks or world_size <= SAMPLE:
        return list(range(world_size))
    return sorted({round(n * (world_size - 1) / (SAMPLE - 1)) for n in range(SAMPLE)})


def _of_all(values: Sequence[int], world_size: int) -> int:
    """The sum over all ranks by that of some: the first and the last, which may be unlike all
    others, stand for themselves alone.
    """
    if len(values) == world_size:
        return sum(values)
    inner = values[1:-1]
    return values[0] + values[-1] + round(sum(inner) * (world_size - 2) / len(inner))
