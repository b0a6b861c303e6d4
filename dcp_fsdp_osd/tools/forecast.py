"""What each rank of a world would read of a checkpoint, before anyone rents the ranks.

From the checkpoint's metadata alone: layouts are simulated (``layout.simulate``), and requests are
planned by the reader's own code (``storage.wanted``, ``storage.ranges``); nothing else is read.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from dcp_fsdp_osd.compact import no_collections
from dcp_fsdp_osd.errors import StorageError
from dcp_fsdp_osd.layout.flat import ParamKind, ParamLayout, simulate, units_of
from dcp_fsdp_osd.layout.geometry import Box, boxes_of_interval
from dcp_fsdp_osd.storage.foreign import HEAD_BYTES, TAIL_BYTES
from dcp_fsdp_osd.storage.memory import DTYPE_NAMES
from dcp_fsdp_osd.storage.metadata import KIND_TENSOR, EntryInfo, metadata_name
from dcp_fsdp_osd.storage.ranges import FileRange, coalesce
from dcp_fsdp_osd.storage.store import Limits
from dcp_fsdp_osd.storage.transfer import Stats
from dcp_fsdp_osd.storage.unpack import Index
from dcp_fsdp_osd.storage.wanted import Wanted
from dcp_fsdp_osd.storage.whole import SMALL
from dcp_fsdp_osd.tools.describe import fqn_and_state
from dcp_fsdp_osd.tools.opened import Checkpoint, Progress, no_progress

__all__ = ["Forecast", "RankForecast", "forecast", "wrapped_modules"]

_REQUEST = 8 << 20  # bytes, as the reader cuts
_HEADER = 1 << 9  # about what lies before the payload in an entry of torch.save
SAMPLE = 128
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
        metadata_nbytes: that each rank reads first (or one for all, with a `process_group`).
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
    layout: Literal["fsdp1", "fsdp2"] = "fsdp1",
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
    if world_size < 1 or concurrency < 1 or bandwidth <= 0 or latency < 0:
        raise ValueError(
            "expected world_size and concurrency of 1 at least, bandwidth above 0 and latency of "
            f"0 at least, found {world_size}, {concurrency}, {bandwidth} and {latency}"
        )
    shapes, keys, shared = _parameters(checkpoint)
    if not shapes:
        raise StorageError(f"{checkpoint.url} has no tensor that would be sharded")
    modules = wrapped_modules(shapes, wrapped)
    units, outside = units_of(shapes, ("", *modules))
    reads = _Reads(checkpoint, keys)
    session = checkpoint.session
    metadata_nbytes = checkpoint.call(lambda: session.store.size(metadata_name()), "size")
    limits = session.store.limits
    numbers = _sampled(world_size, all_ranks=all_ranks)
    ranks = []
    with no_collections():  # of the many objects that live on
        for done, rank in enumerate(numbers):
            progress(done, len(numbers))
            if layout == "fsdp1":
                found = simulate(units, outside, world_size=world_size, rank=rank)
                boxes = [each for param in found.params for each in _flat(param)]
            else:
                boxes = list(_rows(shapes, world_size, rank))
            nbytes, needed, requests, files = reads.plan(boxes, limits)
            seconds = latency * (1 + math.ceil(requests / concurrency))
            seconds += (metadata_nbytes + nbytes) / bandwidth
            ranks.append(RankForecast(rank, nbytes, needed, requests, files, seconds))
    scale = world_size / len(ranks)
    return Forecast(
        url=checkpoint.url,
        world_size=world_size,
        layout=layout,
        units=len(units),
        ranks=tuple(ranks),
        metadata_nbytes=metadata_nbytes,
        shared_entries=len(shared),
        shared_nbytes=sum(shared.values()),
        seconds=max(each.seconds for each in ranks),
        total_nbytes=round(scale * sum(each.nbytes for each in ranks)),
        total_requests=round(scale * sum(each.requests for each in ranks)),
    )


def wrapped_modules(fqns: Iterable[str], patterns: Iterable[str] | None) -> list[str]:
    """The modules that `patterns` mean; by default the outermost ones with a number for a name.

    Raises:
        ValueError: a pattern matches no module.
    """
    modules = dict.fromkeys(
        ".".join(parts[:n])
        for parts in (fqn.split(".") for fqn in fqns)
        for n in range(1, len(parts))
    )
    if patterns is None:
        numbered = [name for name in modules if name.rpartition(".")[2].isdecimal()]
        return [
            name for name in numbered if not any(name.startswith(f"{other}.") for other in numbered)
        ]
    found: dict[str, None] = {}
    for pattern in patterns:
        form = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
        matched = [name for name in modules if form.fullmatch(name)]
        if not matched and pattern:
            raise ValueError(
                f"no module of the checkpoint's parameters is named {pattern!r}; they are named "
                f"like {', '.join(list(modules)[:5]) or 'nothing: there are none'}"
            )
        found.update(dict.fromkeys(matched))
    return list(found)


def _parameters(
    checkpoint: Checkpoint,
) -> tuple[dict[str, tuple[int, ...]], dict[str, list[str]], dict[str, int]]:
    """Shapes by FQN; the keys of tensors that are sharded as their parameter is, by FQN; and what
    is read once, with its bytes.
    """
    names = {key: fqn_and_state(checkpoint.path(key)) for key in checkpoint.tensors}
    shapes: dict[str, tuple[int, ...]] = {}
    weights: set[str] = set()
    for of_state in (False, True):  # a weight says its shape best; else its largest state does
        for key, (fqn, state) in names.items():  # in the order in which they were saved
            shape = checkpoint.shape(key)
            if bool(state) is not of_state or fqn in weights or not shape:
                continue
            if math.prod(shape) > math.prod(shapes.get(fqn, (0,))):
                shapes[fqn] = shape
        weights = set(shapes)
    keys: dict[str, list[str]] = {}
    shared: dict[str, int] = {}
    for key, (fqn, _) in names.items():
        if shapes.get(fqn) == checkpoint.shape(key):
            keys.setdefault(fqn, []).append(key)
        else:
            shared[key] = checkpoint.nbytes(key)
    index = Index(checkpoint.metadata)
    for key in checkpoint.objects():
        shared[key] = index.entry(MetadataIndex(key)).length
    return shapes, keys, shared


def _sampled(world_size: int, *, all_ranks: bool) -> list[int]:
    if all_ranks or world_size <= SAMPLE:
        return list(range(world_size))
    return sorted({round(n * (world_size - 1) / (SAMPLE - 1)) for n in range(SAMPLE)})


def _flat(param: ParamLayout) -> Iterator[tuple[str, Box]]:
    """What a rank holds of FSDP1's flat tensors; a world of one holds whole tensors."""
    if param.kind is ParamKind.WHOLE:
        for fqn, shape in zip(param.fqns, param.shapes, strict=True):
            yield fqn, Box((0,) * len(shape), tuple(shape))
    for segment in param.segments:
        if segment.stop > segment.start:
            for box in boxes_of_interval(segment.shape, segment.start, segment.stop):
                yield segment.fqn, box


def _rows(
    shapes: Mapping[str, Sequence[int]], world_size: int, rank: int
) -> Iterator[tuple[str, Box]]:
    """What ``fully_shard`` leaves a rank: a chunk of the rows, as ``torch.chunk`` cuts."""
    for fqn, shape in shapes.items():
        size = -(-shape[0] // world_size)
        first, last = min(size * rank, shape[0]), min(size * (rank + 1), shape[0])
        if first < last:
            yield fqn, Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))


class _Guessed(Index):
    """An index that takes entries of ``torch.save`` for ours: their payload lies a few hundred
    bytes into them too, which is found out by reading them, and matters little here.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint.metadata)
        self._dtypes = {key: checkpoint.dtype(key) for key in checkpoint.tensors}

    def entry(self, index: MetadataIndex) -> EntryInfo:
        info = super().entry(index)
        dtype = self._dtypes[index.fqn]
        if info.kind is not None or dtype not in DTYPE_NAMES:
            return info
        nbytes = math.prod(self.sizes(index)) * dtype.itemsize
        if nbytes >= info.length:
            return info
        return replace(
            info,
            kind=KIND_TENSOR,
            payload=min(_HEADER, info.length - nbytes - 1),
            nbytes=nbytes,
            dtype=DTYPE_NAMES[dtype],
        )


class _Reads:
    """The reader's plan of boxes of parameters."""

    def __init__(self, checkpoint: Checkpoint, keys: Mapping[str, Sequence[str]]) -> None:
        self._checkpoint, self._keys = checkpoint, keys
        self._index = _Guessed(checkpoint)
        self._verify = checkpoint.checksum is not None
        self._planner = DefaultLoadPlanner()

    def plan(self, boxes: Iterable[tuple[str, Box]], limits: Limits) -> tuple[int, int, int, int]:
        """Bytes, bytes needed, requests and files."""
        stats = Stats()
        items = [
            item
            for fqn, box in boxes
            for key in self._keys.get(fqn, ())
            for item in self._items(key, box)
        ]
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
        parts = [self._ends(items), wanted.first, wanted.rest]
        fetches = [
            fetch
            for part in parts
            for fetch in coalesce(part, max_gap_bytes=limits.gap, max_bytes=_REQUEST)
        ]
        nbytes = sum(fetch.end - fetch.start for fetch in fetches)
        files = {fetch.name for fetch in fetches}
        return nbytes, stats.needed, len(fetches), len(files)

    def _items(self, key: str, box: Box) -> Iterator[ReadItem]:
        for saved, both in self._checkpoint.chunks(key).overlapping(box):
            offsets = (a - b for a, b in zip(both.offsets, saved.offsets, strict=True))
            yield ReadItem(
                type=LoadItemType.TENSOR,
                dest_index=MetadataIndex(key),
                dest_offsets=torch.Size(()),
                storage_index=MetadataIndex(key, torch.Size(saved.offsets)),
                storage_offsets=torch.Size(offsets),
                lengths=torch.Size(both.sizes),
            )

    def _ends(self, items: Iterable[ReadItem]) -> list[tuple[str, FileRange]]:
        """What is read of stock's entries to find their payloads."""
        found: list[tuple[str, FileRange]] = []
        for index in dict.fromkeys(item.storage_index for item in items):
            info = Index.entry(self._index, index)
            if info.kind is None and info.length > SMALL:
                begin, end = info.offset, info.offset + info.length
                found.append((info.name, FileRange(begin, begin + HEAD_BYTES, 0, 0, ())))
                found.append((info.name, FileRange(end - TAIL_BYTES, end, 0, 1, ())))
        return found
