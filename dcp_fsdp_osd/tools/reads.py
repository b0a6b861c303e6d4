"""What a rank of a load asks storage for, planned by the reader's own code (``storage.wanted``,
``storage.ranges``) from the metadata alone; and when, at a bandwidth and a latency.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from dcp_fsdp_osd.layout.geometry import Box
from dcp_fsdp_osd.storage.chunks import ChunkTable
from dcp_fsdp_osd.storage.foreign import HEAD_BYTES, TAIL_BYTES
from dcp_fsdp_osd.storage.memory import DTYPE_NAMES
from dcp_fsdp_osd.storage.metadata import KIND_TENSOR, EntryInfo, metadata_name
from dcp_fsdp_osd.storage.ranges import Fetch, FileRange, coalesce
from dcp_fsdp_osd.storage.transfer import Stats
from dcp_fsdp_osd.storage.unpack import Entry, Index
from dcp_fsdp_osd.storage.wanted import Wanted
from dcp_fsdp_osd.storage.whole import SMALL, SmallEntries
from dcp_fsdp_osd.tools.opened import Checkpoint
from dcp_fsdp_osd.tools.sharding import Layout, Sharding

__all__ = ["Pace", "Planned", "Reads", "Request", "requests_of", "schedule"]

_REQUEST = 8 << 20  # bytes, as the reader cuts
_NOWHERE = torch.Size(())  # nothing is read
_HEADER = 1 << 9  # about what lies before the payload in an entry of torch.save


@dataclass(frozen=True)
class Pace:
    """Of one rank's requests: its bytes a second, the seconds of a request, how many at a time.

    Raises:
        ValueError: one is out of its range.
    """

    bandwidth: float = 1e9
    latency: float = 0.02
    concurrency: int = 16

    def __post_init__(self) -> None:
        if self.concurrency < 1 or self.bandwidth <= 0 or self.latency < 0:
            raise ValueError(
                "expected concurrency of 1 at least, bandwidth above 0 and latency of 0 at least, "
                f"found {self.concurrency}, {self.bandwidth} and {self.latency}"
            )

    def seconds(self, requests: int, nbytes: int) -> float:
        """Of a load: of its first request, the metadata's, and then of `requests` others."""
        rounds = 1 + math.ceil(requests / self.concurrency)
        return self.latency * rounds + nbytes / self.bandwidth


@dataclass(frozen=True)
class Planned:
    """What one rank reads.

    Attributes:
        fetches: its requests.
        keys: of the tensors that each of them reads of.
        needed: bytes of the elements that it holds.
    """

    fetches: tuple[Fetch, ...]
    keys: tuple[tuple[str, ...], ...]
    needed: int


@dataclass(frozen=True)
class Request:
    """A request of a load, as it is forecast.

    Attributes:
        start, end: in seconds from the start of the load.
        lane: which of those that are under way at a time.
        file, offset, nbytes: what it reads.
        keys: of the tensors that it reads of.
        requests: how many it stands for, where several are drawn as one.
    """

    start: float
    end: float
    lane: int
    file: str
    offset: int
    nbytes: int
    keys: tuple[str, ...]
    requests: int = 1


def requests_of(
    checkpoint: Checkpoint,
    world_size: int,
    rank: int,
    *,
    layout: Layout = "fsdp1",
    wrapped: Iterable[str] | None = None,
    bandwidth: float = 1e9,
    latency: float = 0.02,
    concurrency: int = 16,
) -> list[Request]:
    """The requests of one rank of a load, the metadata's first, and when each is under way.

    Raises:
        ValueError: an argument is out of its range, or a pattern matches nothing.
        StorageError: the checkpoint has no tensor that is sharded.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"expected a rank from 0 to {world_size - 1}, found {rank}")
    pace = Pace(bandwidth, latency, concurrency)
    sharding = Sharding(checkpoint, world_size, layout=layout, wrapped=wrapped)
    reads = Reads(checkpoint, sharding.keys)
    planned = reads.plan(sharding.boxes(rank))
    times = schedule(
        [fetch.end - fetch.start for fetch in planned.fetches], reads.metadata_nbytes, pace
    )
    begin = pace.seconds(0, reads.metadata_nbytes)
    offset = max(reads.metadata_file_nbytes - reads.metadata_nbytes, 0)  # an index is at the end
    found = [Request(0.0, begin, 0, metadata_name(), offset, reads.metadata_nbytes, ())]
    for fetch, keys, (start, end, lane) in zip(planned.fetches, planned.keys, times, strict=True):
        nbytes = fetch.end - fetch.start
        found.append(Request(start, end, lane, fetch.name, fetch.start, nbytes, keys))
    return found


def schedule(
    sizes: Sequence[int], metadata_nbytes: int, pace: Pace
) -> list[tuple[float, float, int]]:
    """Start, end and lane of requests of so many bytes, after that of the metadata.  Pure.

    Rounds of as many as run at a time: all of a round wait for the latency, and then share the
    bandwidth evenly, so that the last one ends after :meth:`Pace.seconds`.
    """
    found: list[tuple[float, float, int]] = [(0.0, 0.0, 0)] * len(sizes)
    now = pace.seconds(0, metadata_nbytes)
    for first in range(0, len(sizes), pace.concurrency):
        members = range(first, min(first + pace.concurrency, len(sizes)))
        end, taken = now + pace.latency, 0
        for done, number in enumerate(sorted(members, key=lambda each: sizes[each])):
            end += (sizes[number] - taken) * (len(members) - done) / pace.bandwidth
            taken = sizes[number]
            found[number] = now, end, number - first
        now = end
    return found


class _Guessed(Index):
    """An index that takes entries of ``torch.save`` for ours: their payload lies a few hundred
    bytes into them too, which is found out by reading them, and matters little here.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint.metadata)
        self._tensors = checkpoint.tensors
        self._dtypes = {key: checkpoint.dtype(key) for key in checkpoint.tensors}

    def entry(self, index: MetadataIndex) -> EntryInfo:
        info = super().entry(index)
        dtype = self._dtypes[index.fqn]
        if info.kind is not None or dtype not in DTYPE_NAMES:
            return info
        nbytes = math.prod(self.sizes(index)) * dtype.itemsize
        if nbytes >= info.length:
            return info
        name, begin, length = info.name, info.offset, info.length
        payload = min(_HEADER, length - nbytes - 1)
        return EntryInfo(
            name, begin, length, KIND_TENSOR, None, payload, nbytes, DTYPE_NAMES[dtype]
        )

    def sizes(self, index: MetadataIndex) -> tuple[int, ...]:
        if index.index is None:
            return super().sizes(index)
        chunks = self._tensors[index.fqn].chunks  # of which it is one by construction
        if isinstance(chunks, ChunkTable):
            return chunks.at(index.index)[1]
        return tuple(chunks[index.index].sizes)


class Reads:
    """The reader's plan of boxes of parameters.

    Attributes:
        metadata_nbytes: that are read before all else.
        metadata_file_nbytes: of all of the file that they are read of.
    """

    def __init__(self, checkpoint: Checkpoint, keys: Mapping[str, Sequence[str]]) -> None:
        self._checkpoint, self._keys = checkpoint, keys
        self._index = _Guessed(checkpoint)
        self._verify = checkpoint.checksum is not None
        self._ours = hasattr(checkpoint.metadata, "dcp_fsdp_osd")
        self._planner = DefaultLoadPlanner()
        self._cut_alike: dict[str, list[list[str]]] = {}
        store = checkpoint.session.store
        self.metadata_nbytes = checkpoint.metadata_nbytes
        self.metadata_file_nbytes = checkpoint.call(lambda: store.size(metadata_name()), "size")
        self._gap = store.limits.gap

    def plan(self, boxes: Iterable[tuple[str, Box]]) -> Planned:
        """The requests for boxes of parameters, and for all state that is sharded alike."""
        stats = Stats()
        items = [item for fqn, box in boxes for item in self._items(fqn, box)]
        wanted = Wanted(
            items,
            self._index,
            self._planner,
            stats=stats,
            limit=_REQUEST,
            verify=self._verify,
            label=self._checkpoint.url,
            size_of=lambda name: 1 << 62,
            ends_of=lambda groups: [(b"", b"")] * len(groups),
        )
        of_entry = [_keys_of(entry) for entry in wanted.entries]
        ends, of_end = self._ends(items)
        fetches: list[Fetch] = []
        keys: list[tuple[str, ...]] = []
        for ranges, names in ((ends, of_end), (wanted.first, of_entry), (wanted.rest, of_entry)):
            for fetch in coalesce(ranges, max_gap_bytes=self._gap, max_bytes=_REQUEST):
                fetches.append(fetch)
                read = itertools.chain.from_iterable(names[each.entry] for each in fetch.ranges)
                keys.append(tuple(dict.fromkeys(read)))
        return Planned(tuple(fetches), tuple(keys), stats.needed)

    def _items(self, fqn: str, box: Box) -> Iterator[ReadItem]:
        for keys in self._alike(fqn):
            for found in self._checkpoint.chunks(keys[0]).overlapping(box.offsets, box.sizes):
                at = torch.Size(found.saved)
                offsets = torch.Size([a - b for a, b in zip(found.offsets, at, strict=True)])
                lengths = torch.Size(found.sizes)
                for key in keys:
                    index = MetadataIndex(key, at, found.number)
                    yield ReadItem(LoadItemType.TENSOR, index, _NOWHERE, index, offsets, lengths)

    def _alike(self, fqn: str) -> list[list[str]]:
        """The keys of a parameter by how they are cut into chunks: a weight and its state are cut
        alike, and are looked at together."""
        found = self._cut_alike.get(fqn)
        if found is None:
            tensors = self._checkpoint.tensors
            found = self._cut_alike[fqn] = []
            for key in self._keys.get(fqn, ()):
                for keys in found:
                    if tensors[keys[0]].chunks == tensors[key].chunks:
                        keys.append(key)
                        break
                else:
                    found.append([key])
        return found

    def _ends(
        self, items: Iterable[ReadItem]
    ) -> tuple[list[tuple[str, FileRange]], list[tuple[str, ...]]]:
        """What is read of stock's entries to find their payloads; and the key of each."""
        found: list[tuple[str, FileRange]] = []
        keys: list[tuple[str, ...]] = []
        if self._ours:  # which say where payloads lie
            return found, keys
        for index in dict.fromkeys(item.storage_index for item in items):
            info = Index.entry(self._index, index)
            if info.kind is None and info.length > SMALL:
                begin, end = info.offset, info.offset + info.length
                number = len(keys)
                keys.append((index.fqn,))
                found.append((info.name, FileRange(begin, begin + HEAD_BYTES, number, 0, ())))
                found.append((info.name, FileRange(end - TAIL_BYTES, end, number, 1, ())))
        return found, keys


def _keys_of(entry: Entry) -> tuple[str, ...]:
    members = entry.members if isinstance(entry, SmallEntries) else [entry]
    return tuple(each.fqn for each in members)
