"""Runs a load plan: the read side's execution.

:class:`Fetcher` reads what :class:`~dcp_fsdp_osd.storage.wanted.Wanted` found to be wanted.  The
caller's thread plans, resolves destinations, scatters and commits; pool threads read and checksum.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from dcp_fsdp_osd.errors import CorruptCheckpointError
from dcp_fsdp_osd.storage.checksum import Checksum, RangeHasher
from dcp_fsdp_osd.storage.device import SideStreams
from dcp_fsdp_osd.storage.foreign import HEAD_BYTES, TAIL_BYTES
from dcp_fsdp_osd.storage.memory import DTYPES, ScratchPool, revoke, view_bytes
from dcp_fsdp_osd.storage.progress import Progress
from dcp_fsdp_osd.storage.ranges import Fetch, FileRange, Span, coalesce
from dcp_fsdp_osd.storage.session import Session
from dcp_fsdp_osd.storage.transfer import Budget, Pool, Stats
from dcp_fsdp_osd.storage.unpack import GRAIN, Entry, Index, Item, TensorEntry
from dcp_fsdp_osd.storage.wanted import Group, Wanted
from dcp_fsdp_osd.storage.whole import SmallEntries, WholeEntry

__all__ = ["Fetcher"]

READ_BYTES = 8 << 20
"""Longest range of one request."""


@dataclass
class _Landing:
    """A span that lands in a buffer, from byte `start` of it, and is moved on to `item`."""

    item: Item
    span: Span
    start: int


@dataclass
class _Job:
    """One request under way.

    Attributes:
        views: the memory that it fills, in order; slices of it belong to the file ranges in order.
        shares: for each file range, the range of `views` that is its own.
        landings: what to move on from `buffer` afterwards.
        small: entries whose bytes lie in a range of `buffer`.
        crcs: what the thread computed: (entry, block or -1 for header) -> checksum.
        around: bytes of headers and trailers that were read, by file range.
        copied: come when an accelerator has taken what it wants of `buffer`.
    """

    fetch: Fetch
    views: list[memoryview] = field(default_factory=list)
    shares: list[tuple[int, int]] = field(default_factory=list)
    landings: list[_Landing] = field(default_factory=list)
    small: list[tuple[SmallEntries, int, int]] = field(default_factory=list)
    buffer: torch.Tensor | None = None
    charge: int = 0
    blocks: list[tuple[int, int, list[int]]] = field(default_factory=list)
    around: list[tuple[FileRange, bytes]] = field(default_factory=list)
    copied: list[torch.Event] = field(default_factory=list)


class Fetcher:
    """One call of ``read_data``.  Use once, from one thread."""

    def __init__(
        self,
        session: Session,
        metadata: Metadata,
        planner: LoadPlanner,
        *,
        stats: Stats,
        checksum: Checksum | None,
        allow_pickle: bool,
        max_inflight: int,
        gap: int | None,
        stall: float,
        progress: bool,
    ) -> None:
        self._session = session
        self._index = Index(metadata)
        self._planner = planner
        self._stats = stats
        self._checksum = checksum
        self._allow_pickle = allow_pickle
        self._max_inflight = max_inflight
        self._stall = stall
        self._progress = progress
        self._limits = session.store.limits
        self._gap = self._limits.gap if gap is None else gap
        # A sixteenth is left for the alignment of what is staged, and for headers and trailers.
        room = (max_inflight - max_inflight // 16) // (1 + self._limits.read_copies)
        self._limit = max(min(READ_BYTES, room) // GRAIN * GRAIN, GRAIN)
        self._budget = Budget(max_inflight, stats)
        # Requests are up to a sixteenth longer, and what is staged of them is aligned.
        self._scratch = ScratchPool(self._limit + self._limit // 8, max_inflight // self._limit + 1)
        self._entries: list[Entry] = []
        self._items: list[Item] = []
        self._under_way: dict[int, _Job] = {}  # by id
        self._streams = SideStreams()
        self._copying: deque[_Job] = deque()  # to accelerators, oldest first

    def run(self, reads: Sequence[ReadItem]) -> None:
        """Read all items and commit each to the planner."""
        try:
            self._run(reads)
        except BaseException:
            # A thread that was left behind must not find what it was to fill: others use it now.
            for job in self._under_way.values():
                revoke(job.views)
            self._streams.wait()
            raise

    def _run(self, reads: Sequence[ReadItem]) -> None:
        session = self._session
        with Pool(
            session.level(), stall=self._stall, what=f"{session.url}: read", stats=self._stats
        ) as self._pool:
            wanted = Wanted(
                reads,
                self._index,
                self._planner,
                stats=self._stats,
                limit=self._limit,
                verify=self._checksum is not None,
                label=f"{session.url}: rank {session.rank}",
                size_of=self._size_of,
                ends_of=self._read_ends,
            )
            self._entries, self._items = wanted.entries, wanted.items
            fetches = [
                fetch
                for part in (wanted.first, wanted.rest)
                for fetch in coalesce(part, max_gap_bytes=self._gap, max_bytes=self._limit)
            ]
            for file_range in itertools.chain.from_iterable(fetch.ranges for fetch in fetches):
                entry = self._entries[file_range.entry]
                entry.left += 1
                if isinstance(entry, TensorEntry):
                    for key in {span.key for span in file_range.spans}:
                        self._items[key].left += 1
            total = sum(fetch.end - fetch.start for fetch in fetches)
            with Progress(
                f"load {session.url}", total, rank=session.rank, enabled=self._progress
            ) as self._bar:
                for fetch in fetches:
                    self._start(fetch)
                while self._pool.pending:
                    self._finish(self._pool.poll(block=True))
                while self._copying:
                    self._release(self._copying.popleft())

    # ---- what is asked while it is found out what to read ----

    def _size_of(self, name: str) -> int:
        store = self._session.store
        return self._session.call(lambda: store.size(name), "size", self._stats)

    def _read_ends(self, foreign: Sequence[Group]) -> list[tuple[bytes, bytes]]:
        """The first and last bytes of entries that stock wrote, in a few requests."""
        ends = []
        for number, (info, _) in enumerate(foreign):
            begin, end = info.offset, info.offset + info.length
            ends.append((info.name, FileRange(begin, begin + HEAD_BYTES, number, 0, ())))
            ends.append((info.name, FileRange(end - TAIL_BYTES, end, number, 1, ())))
        found: list[list[bytes]] = [[b"", b""] for _ in foreign]

        def read(fetch: Fetch) -> tuple[Fetch, bytes]:
            data = bytearray(fetch.end - fetch.start)
            info, group = foreign[fetch.ranges[0].entry]
            self._read_range(
                fetch, [memoryview(data)], f"{info.name}: {group[0].storage_index.fqn}"
            )
            return fetch, bytes(data)

        def collect(results: list[tuple[Fetch, bytes]]) -> None:
            for fetch, data in results:
                self._budget.release(len(data) * (1 + self._limits.read_copies))
                self._stats.add(bytes=len(data))
                for part in fetch.ranges:
                    start = part.start - fetch.start
                    found[part.entry][part.origin] = data[start : start + part.end - part.start]

        for fetch in coalesce(ends, max_gap_bytes=self._gap, max_bytes=self._limit):
            count = (fetch.end - fetch.start) * (1 + self._limits.read_copies)
            while not self._budget.try_acquire(count):
                collect(self._pool.wait_for_one(count, self._budget))
            self._pool.submit(partial(read, fetch), patience=self._limits.patience)
        collect(self._pool.drain())
        return [(head, tail) for head, tail in found]

    # ---- reading ----

    def _start(self, fetch: Fetch) -> None:
        """Lay out the memory that the request fills, and submit it."""
        while self._pool.full:
            self._finish(self._pool.poll(block=True))
        self._finish(self._pool.poll(block=False))
        job = _Job(fetch)
        parts: list[memoryview | tuple[int, int]] = []
        used = 0

        def stage(size: int) -> tuple[int, int]:
            nonlocal used
            begin = used + -used % GRAIN
            used = begin + size
            parts.append((begin, used))
            return begin, used

        position = fetch.start
        for file_range in fetch.ranges:
            if file_range.start > position:
                stage(file_range.start - position)
            first = len(parts)
            self._lay_out(file_range, job, parts, stage)
            job.shares.append((first, len(parts)))
            position = file_range.end
        job.charge = used + self._limits.read_copies * (fetch.end - fetch.start)
        while not self._budget.try_acquire(job.charge):
            if self._copying:
                self._release(self._copying.popleft())
            else:
                self._finish(self._pool.wait_for_one(job.charge, self._budget))
        whole = memoryview(b"")
        if used:
            devices = (landing.item.device for landing in job.landings)
            job.buffer = self._scratch.take(used, next(filter(None, devices), None))
            whole = view_bytes(job.buffer)
        job.views = [whole[p[0] : p[1]] if isinstance(p, tuple) else p for p in parts]
        self._under_way[id(job)] = job
        self._pool.submit(partial(self._read, job), patience=self._limits.patience)

    def _lay_out(
        self,
        file_range: FileRange,
        job: _Job,
        parts: list[memoryview | tuple[int, int]],
        stage: Callable[[int], tuple[int, int]],
    ) -> None:
        entry = self._entries[file_range.entry]
        if isinstance(entry, WholeEntry):
            if entry.data is None:
                entry.data = bytearray(entry.info.length)
            at = file_range.start - entry.info.offset
            parts.append(memoryview(entry.data)[at : at + file_range.end - file_range.start])
            return
        if isinstance(entry, SmallEntries):
            job.small.append((entry, *stage(file_range.end - file_range.start)))
            return
        assert isinstance(entry, TensorEntry)
        if file_range.origin < 0:
            stage(file_range.end - file_range.start)
            return
        for span in file_range.spans:
            self._items[span.key].resolve(self._planner, entry.dtype)
        at, end = file_range.start - file_range.origin, file_range.end - file_range.origin
        items = [self._items[span.key] for span in file_range.spans]
        shared = any(b.start < a.end for a, b in itertools.pairwise(file_range.spans))
        direct = self._limits.revocable and all(
            item.view is not None and span.dest is not None
            for span, item in zip(file_range.spans, items, strict=True)
        )
        if shared or not direct:
            # Two items want the same bytes, or bytes cannot land in a destination: land once in a
            # buffer, and move on from there.
            begin, _ = stage(end - at)
            for span, item in zip(file_range.spans, items, strict=True):
                job.landings.append(_Landing(item, span, begin + span.start - at))
            return
        for span, item in zip(file_range.spans, items, strict=True):
            assert item.view is not None and span.dest is not None
            if span.start > at:
                stage(span.start - at)
            parts.append(item.view[span.dest : span.dest + span.end - span.start])
            at = span.end
        if at < end:
            stage(end - at)

    def _read(self, job: _Job) -> _Job:
        """On a pool thread: fill the views, and compute the checksums of what comes in."""
        fetch = job.fetch
        checked: list[tuple[FileRange, int]] = []
        around: list[tuple[FileRange, int]] = []
        for file_range, (first, _) in zip(fetch.ranges, job.shares, strict=True):
            entry = self._entries[file_range.entry]
            if self._checksum is None or not isinstance(entry, TensorEntry) or not entry.block:
                continue
            if file_range.origin < 0:
                around.append((file_range, first))
            else:
                checked.append((file_range, entry.block))
        where = self._entries[fetch.ranges[0].entry].where()
        found = self._read_range(fetch, job.views, where, checked)
        for (file_range, block), crcs in zip(checked, found, strict=True):
            number = (file_range.start - file_range.origin) // block
            job.blocks.append((file_range.entry, number, crcs))
        job.around = [(file_range, bytes(job.views[first])) for file_range, first in around]
        return job

    def _read_range(
        self,
        fetch: Fetch,
        views: list[memoryview],
        where: str,
        checked: Sequence[tuple[FileRange, int]] = (),
    ) -> list[list[int]]:
        """Fill the views; the checksums of the blocks of those lengths of each of `checked`."""
        session = self._session

        def read() -> list[list[int]]:
            if self._checksum is None or not checked:
                session.store.read_into(fetch.name, fetch.start, views)
                return []
            ranges = [(part.start, part.end, block) for part, block in checked]
            hasher = RangeHasher(self._checksum, fetch.start, ranges)
            session.store.read_into(fetch.name, fetch.start, views, hasher.update)
            return hasher.finish()

        try:
            return session.retried(
                read,
                f"read {fetch.name} bytes {fetch.start} to {fetch.end}",
                self._stats,
                self._pool.stopped,
            )
        except (EOFError, FileNotFoundError) as error:
            problem = (
                "the file is missing"
                if isinstance(error, FileNotFoundError)
                else f"the file is shorter than byte {fetch.end} ({error})"
            )
            raise CorruptCheckpointError(
                f"{session.url}: rank {session.rank}: {where}: {problem}. The checkpoint is "
                "incomplete; load another one."
            ) from error

    # ---- landing ----

    def _finish(self, jobs: Iterable[_Job]) -> None:
        while self._copying and all(event.query() for event in self._copying[0].copied):
            self._release(self._copying.popleft())
        for job in jobs:
            del self._under_way[id(job)]
            self._land(job)
            fetch = job.fetch
            size = fetch.end - fetch.start
            self._stats.add(bytes=size)
            self._bar.add(size)
            for number, first, crcs in job.blocks:
                entry = self._entries[number]
                assert isinstance(entry, TensorEntry)
                entry.crcs.update(enumerate(crcs, first))
            try:
                for file_range, data in job.around:
                    entry = self._entries[file_range.entry]
                    assert isinstance(entry, TensorEntry) and self._checksum is not None
                    entry.take_around(file_range, data, self._checksum)
                self._deliver_small(job)
                for file_range in fetch.ranges:
                    self._arrived(file_range)
            except CorruptCheckpointError as error:
                raise CorruptCheckpointError(
                    f"{self._session.url}: rank {self._session.rank}: {error}"
                ) from None
            if job.copied:
                self._copying.append(job)
            else:
                self._release(job)

    def _release(self, job: _Job) -> None:
        """Give back what the job held."""
        for event in job.copied:
            event.synchronize()
        self._budget.release(job.charge)
        if job.buffer is not None:
            self._scratch.give(job.buffer)
            job.buffer = None

    def _land(self, job: _Job) -> None:
        """Move on what could not land in its destination."""
        if job.buffer is None:
            return
        for device, landings in itertools.groupby(job.landings, lambda each: each.item.device):
            copy = partial(_copy, job.buffer, list(landings))
            if device is None:
                copy()
            else:
                job.copied.append(self._streams.up(device, copy))

    def _deliver_small(self, job: _Job) -> None:
        if job.buffer is None or not job.small:
            return
        whole = view_bytes(job.buffer)
        for entry, begin, end in job.small:
            entry.deliver(
                whole[begin:end], self._planner, self._checksum, allow_pickle=self._allow_pickle
            )

    def _arrived(self, file_range: FileRange) -> None:
        """Check what can be checked by now, and hand complete items to the planner."""
        entry = self._entries[file_range.entry]
        entry.left -= 1
        if isinstance(entry, WholeEntry):
            if entry.left == 0:
                entry.deliver(self._planner, self._checksum, allow_pickle=self._allow_pickle)
            return
        if isinstance(entry, SmallEntries):
            return
        assert isinstance(entry, TensorEntry)
        for key in {span.key for span in file_range.spans}:
            item = self._items[key]
            item.left -= 1
            if item.left == 0:
                entry.landed.append(item)
        for item in entry.check():
            item.commit(self._planner)


def _copy(buffer: torch.Tensor, landings: Sequence[_Landing]) -> None:
    for landing in landings:
        item, span = landing.item, landing.span
        assert isinstance(item.entry, TensorEntry)
        raw = buffer[landing.start : landing.start + span.end - span.start]
        item.land(span, raw.view(DTYPES[item.entry.dtype]))
