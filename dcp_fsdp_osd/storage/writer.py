"""StreamingWriter: DCP's StorageWriter for a local path or any URL."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from dcp_fsdp_osd.compact import no_collections
from dcp_fsdp_osd.errors import StorageError
from dcp_fsdp_osd.misuse.arguments import HasRole, check_path, check_positive
from dcp_fsdp_osd.misuse.in_use import InUse, begins, goes_on, resets
from dcp_fsdp_osd.misuse.waiting import watched
from dcp_fsdp_osd.storage.checksum import best_checksum
from dcp_fsdp_osd.storage.commit import Committer
from dcp_fsdp_osd.storage.files import FileWriter
from dcp_fsdp_osd.storage.flat_guard import check_flat_pieces
from dcp_fsdp_osd.storage.metadata import dump_metadata, fill_metadata
from dcp_fsdp_osd.storage.pack import item_bytes, plan_files
from dcp_fsdp_osd.storage.results import pack_results, unpack_results
from dcp_fsdp_osd.storage.returned import send_as
from dcp_fsdp_osd.storage.session import accepts, make_session, portable_errors
from dcp_fsdp_osd.storage.store import Backend, Limits, Upload
from dcp_fsdp_osd.storage.transfer import Deadline, RetryPolicy, Stats

__all__ = ["StreamingWriter"]

_LOCAL_PART = 32 << 20
_REMOTE_PART = 8 << 20
_LOCAL_THREADS = 2  # one writes while the other's part is hashed
_FILES = 4
_FILE_BYTES = 64 << 20  # a rank begins a second file when it has about this much for each


@dataclass(frozen=True)
class _Ticket:
    """What a rank's plan carries of one save.

    `nonce` is the rank's own, made anew for each save and put into its local plan; `save_id` is
    the coordinator's, common to all ranks.  A planner that caches plans returns those of an
    earlier save: then the nonce is an old one, and the rest of the ticket is not used.
    """

    nonce: str
    prefix: str = ""
    save_id: str = ""
    ranks: int = 1
    checksum: str | None = None


class StreamingWriter(HasRole, StorageWriter):
    """Writes a checkpoint to a local path or any URL that fsspec or obstore serves.

    Call order and ownership are those of ``torch.distributed.checkpoint.storage.StorageWriter``:
    pass it to ``dcp.save`` or ``dcp.async_save`` (thread or process) with any planner.  Planner
    methods are called from the thread that DCP calls us in, one at a time; tensors are written from
    their own memory and must not change until ``dcp.save`` returns.  It serves any number of saves,
    one after the other: one that begins while another thread's is under way is refused, on all
    ranks.

    A checkpoint exists when its ``.metadata`` exists.  That is written last, in one atomic step,
    after the size of every file has been checked.  Data files have names of their own for each
    save, so that overwriting touches no byte of the old checkpoint before the new one is complete;
    then the old files are deleted.  A save that fails removes what it wrote and raises on all
    ranks.

    Args:
        path_or_url: the checkpoint's folder.  May be None when DCP is given a ``checkpoint_id``.
        overwrite: replace an existing checkpoint; by default one that exists is an error.
        concurrency: threads that write; by default 16 for URLs, and 2 for local paths, which become
            more while that pays, up to 32 (a path may be a network file system).
        part_size: bytes of one write or multipart part, rounded down to a multiple of 64; by
            default 32 MiB for local paths (fewer hand-overs between threads, and still in the
            cache when it is written) and 8 MiB for URLs.
        max_inflight_bytes: bound of the buffers held by this rank: staging copies of tensors that
            are not contiguous CPU memory, and the client's copies.  Tensors' own memory and
            objects that only ``torch.save`` can write are not buffers.
        checksum: write checksums (crc32c where all ranks have that package, else zlib's crc32).
        backend: ``"local"``, ``"fsspec"``, ``"obstore"``, a function that makes a store of a
            ``StoreConfig``, or ``"auto"``: local access for paths; for URLs obstore where it is
            installed, serves the scheme, and takes these options and credentials (for S3 those of
            the options, or what the AWS tools find: environment, profile, SSO, roles), else fsspec.
        storage_options: for S3 ``endpoint_url``, ``region``, ``key``, ``secret``, ``token``,
            ``anon`` and ``allow_http``, whatever the backend, and the options of the backend's own
            client; elsewhere those alone.  Never shown in errors or logs.
        progress: a bar on rank 0 in a terminal, log lines elsewhere.
        fsync: local paths only: everything is on the disk before ``.metadata`` is.
        stall_seconds: a save fails when nothing was written for this long, and on object storage
            when a part of 8 MiB takes three times as long (47 kB/s a connection by default: raise
            it, or lower `concurrency`, below 0.75 MB/s a rank); there a server that says nothing
            more is found out within six times as long and the seconds of `retry`.  Cleaning up
            after a failure takes at most as long again.
        retry: how transient errors are retried.
        deadline: seconds from now (that is, from the making of this writer) within which the
            checkpoint is committed, or the save fails on every rank and removes what it wrote; the
            request that commits is not begun later.

    Attributes:
        stats: what the last save of this rank did.
        backend: what serves the path or URL: ``"local"``, ``"obstore"``, ``"fsspec"`` or the name
            of the function given; ``"auto"`` while there is no path.  Where "auto" chose a client
            for a URL, the log says why (INFO).

    Raises:
        StorageError: from any method, wrapped by DCP into CheckpointException on every rank.
    """

    role = "dcp.save(storage_writer=...)"

    def __init__(
        self,
        path_or_url: str | os.PathLike[str] | None = None,
        *,
        overwrite: bool = False,
        concurrency: int | None = None,
        part_size: int | None = None,
        max_inflight_bytes: int = 256 << 20,
        checksum: bool = True,
        backend: Backend = "auto",
        storage_options: Mapping[str, Any] | None = None,
        progress: bool = False,
        fsync: bool = True,
        stall_seconds: float = 60.0,
        retry: RetryPolicy | None = None,
        deadline: float | None = None,
    ) -> None:
        super().__init__()
        check_path(path_or_url)
        check_positive(
            part_size=part_size,
            max_inflight_bytes=max_inflight_bytes,
            concurrency=concurrency,
            stall_seconds=stall_seconds,
            deadline=deadline,
        )
        self._session = make_session(
            path_or_url,
            backend=backend,
            storage_options=storage_options,
            stall_seconds=stall_seconds,
            fsync=fsync,
            concurrency=concurrency,
            local_threads=_LOCAL_THREADS,
            retry=retry,
        )
        self._overwrite = overwrite
        self._part_size = part_size
        self._max_inflight = max_inflight_bytes
        self._checksum = checksum
        self._progress = progress
        self._stall = stall_seconds
        self._deadline = Deadline(deadline)
        self._ticket = _Ticket(_unique())
        self._metadata_rank: int | None = None
        self._is_coordinator = False
        self._in_use = InUse()
        self._begin()

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self._session.describe()}, overwrite={self._overwrite}, "
            f"checksum={self._checksum})"
        )

    @property
    def backend(self) -> str:
        return self._session.backend

    # ---- DCP's StorageWriter, in call order ----

    @resets
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another save, to `checkpoint_id` if given."""
        if checkpoint_id is not None:
            self._session.move_to(checkpoint_id)
        self._ticket = _Ticket(_unique())

    @begins
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learn this rank's role.  Newer torch passes ``rank`` and ``use_collectives``."""
        del args
        rank = kwargs.get("rank")
        self._is_coordinator = is_coordinator
        self._session.rank = rank or 0
        # Without collectives each rank commits for itself, in a metadata file of its own.
        self._metadata_rank = rank if not kwargs.get("use_collectives", True) else None
        self._ticket = _Ticket(_unique())
        self._begin()

    def _begin(self) -> None:
        self.stats = Stats()
        self._committer = Committer(
            self._session,
            self.stats,
            rank=self._metadata_rank,
            overwrite=self._overwrite,
            deadline=self._deadline,
        )

    def storage_meta(self) -> StorageMeta | None:
        """What is recorded in the checkpoint of where and by which save it was written."""
        return StorageMeta(checkpoint_id=self._session.url, save_id=self._ticket.nonce)

    @portable_errors
    @goes_on
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Refuse to overwrite, where that was not asked for, and flat pieces that a stock planner
        takes for whole tensors; DCP then raises on every rank."""
        check_flat_pieces(plan)
        if self._is_coordinator or self._metadata_rank is not None:
            with self.stats.timed("prepare"):
                self._committer.check_free()
        # What this rank can compute; the coordinator chooses what all can.
        able = best_checksum().name
        plan = replace(plan, storage_data=_Ticket(self._ticket.nonce, checksum=able))
        return watched(plan, f"save to {self._session.url}")

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give each rank the save's id and a prefix for its file names."""
        save_id = self._ticket.nonce
        able = {
            plan.storage_data.checksum for plan in plans if isinstance(plan.storage_data, _Ticket)
        }
        # None tells where all plans are cached ones, whose ranks go on as in the save before.
        common = able.pop() if len(able) == 1 else best_checksum().name if not able else "crc32"
        algorithm = common if self._checksum else None
        return [
            replace(
                plan,
                storage_data=replace(
                    plan.storage_data
                    if isinstance(plan.storage_data, _Ticket)
                    else _Ticket(nonce=""),
                    prefix=f"__{number if self._metadata_rank is None else self._metadata_rank}_",
                    save_id=save_id,
                    ranks=len(plans),
                    checksum=algorithm,
                ),
            )
            for number, plan in enumerate(plans)
        ]

    @portable_errors
    @goes_on
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items; the future is complete on return."""
        ticket = plan.storage_data
        if not isinstance(ticket, _Ticket):
            raise StorageError(
                "the plan lost the storage_data that prepare_global_plan put into it; planners "
                "must carry SavePlan.storage_data along"
            )
        fresh = ticket.nonce == self._ticket.nonce
        # A plan of an earlier save (plan caching) has that save's id.  Names made with it could be
        # those of live files, so the rank's own new id takes its place.
        save_id = ticket.save_id if fresh else self._ticket.nonce
        try:
            with self.stats.timed("write"):
                results = self._write(plan, planner, replace(ticket, save_id=save_id))
        except BaseException:
            if fresh and ticket.ranks > 1:
                self._committer.abort_all(save_id)
            raise
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    @portable_errors
    @goes_on
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Check every file's size, then commit, then delete what was overwritten."""
        with self.stats.timed("metadata"), no_collections():
            written, used = unpack_results(results)
            if len(used) > 1:
                raise StorageError(
                    f"not committed: ranks have written with different checksums ({used}), as "
                    "cached plans make them do where not all ranks have the package crc32c; "
                    "install it on all of them"
                )
            files = fill_metadata(metadata, written, next(iter(used), None))
            metadata.version = "1.0.0"
            metadata.storage_meta = self.storage_meta()
            data = dump_metadata(metadata)
        with self.stats.timed("commit"):
            self._committer.publish(data, files)
        # Of a subclass it is not known what it does to them afterwards.
        if len(results) > 1 and type(self).finish is StreamingWriter.finish:
            send_as(metadata, data)

    @property
    def checkpoint_id(self) -> str:
        """The path or URL that is written to."""
        return self._session.url

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a path, or a URL of a known scheme."""
        return accepts(checkpoint_id)

    # ---- writing ----

    def _write(self, plan: SavePlan, planner: SavePlanner, ticket: _Ticket) -> list[WriteResult]:
        limits = self._session.store.limits
        part_size = self._part_bytes(limits, sum(map(item_bytes, plan.items)))
        plans = plan_files(
            plan.items,
            prefix=ticket.prefix,
            save_id=ticket.save_id,
            files=_FILES,
            least=_FILE_BYTES,
        )
        names = [file.name for file in plans]
        committer = self._committer
        uploads: dict[str, Upload] = {}

        def create(name: str, parallel: int) -> Upload:
            return committer.call(
                lambda store: store.create(name, part_size, parallel), f"create {name}"
            )

        try:
            written = FileWriter(
                self._session,
                planner,
                create,
                uploads,
                self.stats,
                checksum=ticket.checksum,
                part_size=part_size,
                max_inflight_bytes=self._max_inflight,
                stall_seconds=self._stall,
                progress=self._progress,
                deadline=self._deadline,
            ).write(plans)
            if ticket.ranks > 1:
                committer.raise_if_aborted(ticket.save_id)
        except BaseException:
            committer.quietly("abort uploads", *(upload.abort for upload in uploads.values()))
            committer.quietly("remove the failed save", lambda: committer.remove(names))
            raise
        return pack_results(written, ticket.checksum)

    def _part_bytes(self, limits: Limits, largest: int) -> int:
        """The part size, so that a part's buffers fit into the memory limit; `largest` is the size
        that one file could have.
        """
        # A part is being filled: staged, and copied by the client.
        most = self._max_inflight // (1 + limits.write_copies)
        default = _LOCAL_PART if self._session.is_local else _REMOTE_PART
        part = max(min(self._part_size or default, most), limits.min_part)
        part = max(part, -(-2 * largest // limits.max_parts))
        part = max(part - part % 64, 64)
        if part > max(most, 64):
            raise StorageError(
                f"max_inflight_bytes={self._max_inflight} is too small: {largest} bytes are "
                f"written to this storage in parts of at least {limits.min_part}; {most} bytes fit"
            )
        return part


def _unique() -> str:
    return uuid.uuid4().hex
