"""The files of one rank's save: packed chunk by chunk in one thread, written in others."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from torch.distributed.checkpoint.planner import SavePlanner

from dcp_fsdp_osd.storage.checksum import checksum_named
from dcp_fsdp_osd.storage.device import SideStreams
from dcp_fsdp_osd.storage.memory import ScratchPool
from dcp_fsdp_osd.storage.pack import Chunk, FilePlan, item_bytes, pack
from dcp_fsdp_osd.storage.progress import Progress
from dcp_fsdp_osd.storage.results import Entry
from dcp_fsdp_osd.storage.session import SYNCED, Session
from dcp_fsdp_osd.storage.store import Upload
from dcp_fsdp_osd.storage.transfer import Budget, Deadline, InOrder, Pool, Stats

__all__ = ["FileWriter"]


class FileWriter:
    """Writes the files of one save, once: make one, call :meth:`write`, throw it away.

    Args:
        create: makes the upload of a file, with a hint of how many writes it takes at once.
        uploads: filled with the uploads that were begun, by file name; the caller's to abort when
            :meth:`write` raises.
        checksum: name of the payloads' checksum, if any.
        part_size: bytes of a chunk.
        max_inflight_bytes: of chunks that are packed and not yet written.
        stall_seconds: without a chunk written, after which it raises.
        progress: whether to show it.
        deadline: after which it raises.
    """

    def __init__(
        self,
        session: Session,
        planner: SavePlanner,
        create: Callable[[str, int], Upload],
        uploads: dict[str, Upload],
        stats: Stats,
        *,
        checksum: str | None,
        part_size: int,
        max_inflight_bytes: int,
        stall_seconds: float,
        progress: bool,
        deadline: Deadline,
    ) -> None:
        self._deadline = deadline
        self._session, self._planner, self._stats = session, planner, stats
        self._create, self._uploads = create, uploads
        self._checksum, self._part_size, self._progress = checksum, part_size, progress
        self._stall = stall_seconds
        self._scratch = ScratchPool(part_size, max_inflight_bytes // part_size + 1)
        self._streams = SideStreams()
        self._budget = Budget(max_inflight_bytes, stats)
        self._written: list[Entry] = []

    def write(self, plans: Sequence[FilePlan]) -> list[Entry]:
        """Write all items of ``plans``; their files are complete on return.

        Raises:
            StorageError: a request failed for good, nothing was written for too long, or the
                deadline is over.
        """
        url, stats = self._session.url, self._stats
        stats.add(needed=sum(item_bytes(item) for file in plans for item in file.items))
        total = sum(file.nbytes for file in plans)
        with contextlib.ExitStack() as stack:
            stack.callback(self._streams.wait)  # of a save that failed something may be under way
            level = self._session.level()
            what = f"{url}: write"
            self._pool = stack.enter_context(
                Pool(level, stall=self._stall, what=what, stats=stats, deadline=self._deadline)
            )
            self._bar = stack.enter_context(
                Progress(f"save {url}", total, rank=self._session.rank, enabled=self._progress)
            )
            self._complete(self._submit_all(plans, level.most))
        return self._written

    def _submit_all(self, plans: Sequence[FilePlan], most: int) -> dict[str, int]:
        """Pack chunk after chunk and have each written; the sizes of the files, all written."""
        ordered = self._session.store.limits.order == "stream"
        files = [
            (plan.name, InOrder(self._pool.stopped, needed=ordered), self._packed(plan))
            for plan in plans
        ]
        parallel = -(-most // max(len(plans), 1))
        sizes: dict[str, int] = {}
        for name, gate, chunk in _in_turn(files):
            self._deadline.check(f"{self._session.url}: write")
            if name not in self._uploads:
                self._uploads[name] = self._create(name, parallel)
            sizes[name] = chunk.offset + chunk.size
            while self._pool.full:
                self._collect(self._pool.poll(block=True))
            self._collect(self._pool.poll(block=False))
            self._pool.submit(
                partial(self._write_chunk, self._uploads[name], gate, chunk),
                patience=self._patience(),
            )
            # Hashing holds the GIL, and gives it up only every 5 ms to a thread that has
            # finished writing and waits to begin the next chunk: let it have it now.
            time.sleep(0)
        self._collect(self._pool.drain())
        return sizes

    def _packed(self, plan: FilePlan) -> Iterator[Chunk]:
        return pack(
            plan,
            self._planner,
            part_size=self._part_size,
            copies=self._session.store.limits.write_copies,
            checksum=checksum_named(self._checksum) if self._checksum else None,
            scratch=self._scratch,
            streams=self._streams,
            reserve=self._reserve,
            written=self._written,
        )

    def _reserve(self, count: int) -> None:
        # Collecting frees the budget that is waited for, so each result is taken at once.
        while not self._budget.try_acquire(count):
            self._collect(self._pool.wait_for_one(count, self._budget))

    def _collect(self, chunks: list[Chunk]) -> None:
        """Take back what written chunks held."""
        for chunk in chunks:
            for buffer in chunk.scratch:
                self._scratch.give(buffer)
            self._budget.release(chunk.charge)
            self._stats.add(bytes=chunk.size)
            self._bar.add(chunk.size)

    def _write_chunk(self, upload: Upload, gate: InOrder, chunk: Chunk) -> Chunk:
        """In a thread of the pool."""
        with gate.turn(chunk.offset, chunk.size):
            self._session.retried(
                lambda: upload.write(chunk.offset, chunk.pieces),
                f"write {chunk.name} at {chunk.offset}",
                self._stats,
                self._pool.stopped,
            )
        chunk.pieces.clear()
        chunk.keep.clear()
        return chunk

    def _complete(self, sizes: dict[str, int]) -> None:
        for name, upload in self._uploads.items():
            self._pool.submit(
                partial(
                    self._session.retried,
                    partial(upload.complete, sizes[name]),
                    f"complete {name}",
                    self._stats,
                    self._pool.stopped,
                ),
                patience=max(SYNCED, self._patience()),
            )
        self._pool.drain()

    def _patience(self) -> int:
        return self._session.store.limits.patience_for(self._part_size)


def _in_turn(
    files: list[tuple[str, InOrder, Iterator[Chunk]]],
) -> Iterator[tuple[str, InOrder, Chunk]]:
    """One chunk of each file, round and round, so that files that take no parallel writes are
    written side by side.
    """
    while files:
        left = []
        for name, gate, chunks in files:
            chunk = next(chunks, None)
            if chunk is not None:
                yield name, gate, chunk
                left.append((name, gate, chunks))
        files = left
