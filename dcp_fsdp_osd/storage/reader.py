"""StreamingReader: DCP's StorageReader for a local path or any URL."""

from __future__ import annotations

import contextlib
import logging
import os
import uuid
import zlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from dcp_fsdp_osd.errors import CorruptCheckpointError, StorageError
from dcp_fsdp_osd.misuse.arguments import HasRole, check_path, check_positive
from dcp_fsdp_osd.misuse.default_device import cpu_by_default
from dcp_fsdp_osd.misuse.in_use import InUse, begins, goes_on, resets
from dcp_fsdp_osd.misuse.waiting import watched
from dcp_fsdp_osd.storage.checksum import Checksum, checksum_named
from dcp_fsdp_osd.storage.fetch import Fetcher
from dcp_fsdp_osd.storage.flat_guard import Entries
from dcp_fsdp_osd.storage.identity import Identity, check_one_checkpoint, identify
from dcp_fsdp_osd.storage.metadata import (
    FOOT_BYTES,
    HEAD_BYTES,
    MAX_METADATA_BYTES,
    TAIL_BYTES,
    check_ends,
    checksum_name,
    index_start,
    load_index,
    load_metadata,
    metadata_name,
)
from dcp_fsdp_osd.storage.missing import Unreadable, look_around
from dcp_fsdp_osd.storage.once import from_first_rank
from dcp_fsdp_osd.storage.session import accepts, make_session, portable_errors, telling
from dcp_fsdp_osd.storage.store import Backend
from dcp_fsdp_osd.storage.transfer import RetryPolicy, Stats

__all__ = ["StreamingReader"]

_LARGE = 1 << 20  # bytes of metadata whose ends are looked at before they are read
_TAIL = 4 << 20  # so many of them are read first where a request takes long

logger = logging.getLogger(__name__)


class StreamingReader(HasRole, StorageReader):
    """Reads a checkpoint from a local path or any URL that fsspec or obstore serves.

    Reads what ``StreamingWriter`` and stock DCP (``FileSystemWriter``, ``FsspecWriter``) wrote.
    Call order and ownership are those of ``torch.distributed.checkpoint.storage.StorageReader``:
    pass it to ``dcp.load`` with any planner.  Only the byte ranges that the plan needs are read, in
    parallel, into the destination's own memory where that is contiguous CPU memory of the saved
    dtype.  Planner methods are called from the thread that DCP calls us in, one at a time: an
    item's ``resolve_tensor`` when its first bytes are about to be requested (at most twice
    `concurrency` requests of 8 MiB are under way or waiting), its ``commit_tensor`` as soon as it
    is complete and verified, which is about in the order of the files.  When reading fails and the
    planner has a method ``on_read_error(error)``, it is called at once.  One load at a time.

    Args:
        path_or_url: the checkpoint's folder.  May be None when DCP is given a ``checkpoint_id``.
        concurrency: threads that read; by default 16 for URLs, and for local paths 4, or as many as
            there are cores if those are fewer, which become more while that pays, up to 32 (a path
            may be a network file system).
        max_inflight_bytes: bound of the buffers held by this rank, 4 MiB at least: the client's
            copies, and staging for destinations that bytes cannot land in.  A byte item or a tensor
            that only ``torch.load`` can read is held whole, whatever its size.
        max_gap_bytes: ranges of a file this close together are read as one request (of 8 MiB at
            most), with what lies between them, which is thrown away; by default 128 KiB for URLs
            and 4 KiB for local paths.  More makes fewer requests of more bytes, for services that
            limit requests, where thousands of ranks load what another layout has saved.
        verify: check all that is read against the checksums that StreamingWriter left; reads are
            extended to whole blocks of 16 KiB to 1 MiB.  Entries of stock DCP have none.
        allow_pickle: unpickle whatever metadata and byte items name.  Runs code of the
            checkpoint's author's choice.
        backend: as for ``StreamingWriter``, as are the next three.
        storage_options: of the storage client.
        stall_seconds: time limit of storage that does nothing.
        retry: how transient errors are retried.
        process_group: ranks that load together: the first of them reads the metadata and hands it
            to the others.  All of them must call ``dcp.load``.  By default each rank reads it.
        progress: a bar on rank 0 in a terminal, log lines elsewhere.

    Attributes:
        stats: what the last load of this rank did.
        backend: what serves the path or URL: ``"local"``, ``"obstore"``, ``"fsspec"`` or the name
            of the function given; ``"auto"`` while there is no path.  Where "auto" chose a client
            for a URL, the log says why (INFO).

    Raises:
        CorruptCheckpointError: missing, short or altered files.
        UnsafeCheckpointError: see `allow_pickle`.
        StorageError: anything else; all are wrapped by DCP into CheckpointException on every rank.
    """

    role = "dcp.load(storage_reader=...)"

    def __init__(
        self,
        path_or_url: str | os.PathLike[str] | None = None,
        *,
        concurrency: int | None = None,
        max_inflight_bytes: int = 256 << 20,
        max_gap_bytes: int | None = None,
        verify: bool = True,
        allow_pickle: bool = False,
        backend: Backend = "auto",
        storage_options: Mapping[str, Any] | None = None,
        process_group: dist.ProcessGroup | None = None,
        progress: bool = False,
        stall_seconds: float = 60.0,
        retry: RetryPolicy | None = None,
    ) -> None:
        super().__init__()
        check_path(path_or_url)
        check_positive(
            concurrency=concurrency, stall_seconds=stall_seconds, max_gap_bytes=max_gap_bytes
        )
        if max_inflight_bytes < 4 << 20:
            raise ValueError(
                f"expected max_inflight_bytes to be 4 MiB ({4 << 20}) at least, found "
                f"{max_inflight_bytes!r}"
            )
        self._session = make_session(
            path_or_url,
            backend=backend,
            storage_options=storage_options,
            stall_seconds=stall_seconds,
            concurrency=concurrency,
            retry=retry,
        )
        self._max_inflight = max_inflight_bytes
        self._gap = max_gap_bytes
        self._verify = verify
        self._allow_pickle = allow_pickle
        self._group = process_group
        self._progress = progress
        self._stall = stall_seconds
        self._load_id = uuid.uuid4().hex
        self._in_use = InUse()
        self._metadata: Metadata | None = None
        self._read_from = metadata_name(), 0  # and the CRC-32 of what was read
        self.stats = Stats()

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self._session.describe()}, verify={self._verify}, "
            f"allow_pickle={self._allow_pickle})"
        )

    @property
    def backend(self) -> str:
        return self._session.backend

    # ---- DCP's StorageReader, in call order ----

    @resets
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another load, from `checkpoint_id` if given."""
        if checkpoint_id is not None:
            self._session.move_to(checkpoint_id)
        self._metadata = None
        self._load_id = uuid.uuid4().hex

    @cpu_by_default()
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The checkpoint's metadata; with ``rank=`` that of one rank (a save without collectives).

        Collective over `process_group`, if one was given and no ``rank=``.  Where they cannot be
        read, what is returned raises the reason when it is looked at (see ``missing.py``).
        """
        del args
        with self._in_use.beginning() as served:
            metadata = self._described(kwargs.get("rank"))  # which may be collective
            return metadata if served else Unreadable(self._in_use.refusal, missing=False)

    def _described(self, rank: int | None) -> Metadata:
        self.stats = Stats()
        with self.stats.timed("metadata"):
            try:
                metadata = self._load_metadata(rank)
            except BaseException as error:
                failure = self._session.portable(error)
                if not isinstance(failure, Exception):
                    raise
                # Only the absence of the metadata may be answered by those of one rank.
                missing = isinstance(failure.__cause__, FileNotFoundError)
                if missing:
                    return Unreadable(self._missing, missing=rank is None)
                return Unreadable(lambda: failure, missing=False)
        metadata.state_dict_metadata = Entries(metadata.state_dict_metadata)
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        if isinstance(metadata.storage_meta, StorageMeta):
            metadata.storage_meta.load_id = self._load_id
        return metadata

    def _load_metadata(self, rank: int | None) -> Metadata:
        if rank is None:
            read = from_first_rank(self._group, "read the metadata", self._read_metadata_file)
        else:
            read = self._read_metadata_file(rank)
        data, size = read
        self._read_from = metadata_name(rank), zlib.crc32(data)
        what = f"{self._session.url}/{metadata_name(rank)}"
        try:
            if len(data) < size:
                return load_index(data, size, what, rank=rank)
            return load_metadata(data, what, allow_pickle=self._allow_pickle, rank=rank)
        except CorruptCheckpointError as error:
            raise self._replaced(error) from error.__cause__

    def _missing(self) -> StorageError:
        first = not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
        # Thousands of ranks that list a bucket would not find more than one does.
        look = self._session.is_local or first
        found = look_around(self._session, beside=True) if look else ""
        return StorageError(f"no checkpoint at {self._session.url}: {found or 'no .metadata'}")

    @begins
    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Take the metadata to read by, and learn this rank's number on newer versions of torch."""
        del is_coordinator, args
        _ = metadata.state_dict_metadata  # raises why there are none, if that is so
        self._metadata = metadata
        self._session.rank = kwargs.get("rank") or 0

    @goes_on
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan, with what a planner that shares reads between ranks may want to know.

        ``storage_data`` becomes ``{"dcp_fsdp_osd": {...}}``, of plain types only: ``reads_parts``
        (part of an entry costs about its own bytes, wherever it lies), ``reports_errors`` (the
        planner's ``on_read_error`` is called), ``url`` (without secrets), ``remote`` (not the
        local file system), ``save`` (which save it reads, see ``identity.py``).
        """
        about = {
            "reads_parts": True,
            "reports_errors": True,
            "url": self._session.url,
            "remote": not self._session.is_local,
            "save": None if self._metadata is None else identify(self._metadata).save,
        }
        plan = replace(plan, storage_data={"dcp_fsdp_osd": about})
        return watched(plan, f"load from {self._session.url}")

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are, if all ranks read the same checkpoint; a warning where none of
        them asks for anything.

        Raises:
            CheckpointMismatchError: they do not; DCP then raises on every rank.
        """
        told = [plan.storage_data for plan in plans]
        found = [data["dcp_fsdp_osd"] for data in told if isinstance(data, dict)]
        if len(found) == len(plans):
            check_one_checkpoint([Identity(about["save"], about["url"]) for about in found])
        if not any(plan.items for plan in plans) and self._metadata is not None:
            entries = self._metadata.state_dict_metadata
            if entries:
                logger.warning(
                    "%s: nothing is loaded: the checkpoint has %d entries (%s, ...), and the "
                    "state dict asks for none of them. DCP fills no empty dict; "
                    "planner=FlatOptimLoadPlanner(model, optim) does",
                    self._session.url,
                    len(entries),
                    next(iter(entries)),
                )
        return plans

    @goes_on
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's items; the future is complete on return."""
        with telling(planner), self.stats.timed("read"):
            self._read(plan, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @property
    def checkpoint_id(self) -> str:
        """The path or URL that is read from."""
        return self._session.url

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a path, or a URL of a known scheme."""
        return accepts(checkpoint_id)

    @portable_errors
    def _read(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        if self._metadata is None:
            raise StorageError("read_data before set_up_storage_reader")
        fetcher = Fetcher(
            self._session,
            self._metadata,
            planner,
            stats=self.stats,
            checksum=self._checksum(self._metadata),
            allow_pickle=self._allow_pickle,
            max_inflight=self._max_inflight,
            gap=self._gap,
            stall=self._stall,
            progress=self._progress,
        )
        try:
            fetcher.run(plan.items)
        except CorruptCheckpointError as error:
            raise self._replaced(error) from error.__cause__

    def _replaced(self, error: CorruptCheckpointError) -> StorageError:
        """`error`, or what explains it: another save wrote to the path that is read from."""
        name, crc = self._read_from
        session = self._session
        try:
            now, _ = self._read_file(name)
        except FileNotFoundError:
            found = "is gone"
        except Exception:
            return error
        else:
            if zlib.crc32(now) == crc:
                return error
            found = "is another one"
        return StorageError(
            f"{session.url}: rank {session.rank}: the checkpoint was replaced or deleted while it "
            f"was read: its {name} {found} now. Load it again, and let no job save to a path that "
            f"others read from. What was noticed first: {error}"
        )

    # ---- metadata ----

    def _checksum(self, metadata: Metadata) -> Checksum | None:
        name = checksum_name(metadata)
        return checksum_named(name) if self._verify and name is not None else None

    @goes_on
    def _read_metadata_file(self, rank: int | None = None) -> tuple[bytes, int]:
        """The bytes that are needed of the metadata file, which are its last ones, and its size."""
        name = metadata_name(rank)
        try:
            data, size = self._read_file(name)
        except FileNotFoundError as error:
            raise StorageError(f"no checkpoint at {self._session.url}: no {name}") from error
        return data, size

    def _read_file(self, name: str) -> tuple[bytes, int]:
        """All of a metadata file; of one that has an index, that.  One request where it is small,
        and no more of a local file than its ends where it cannot be metadata: files with holes are
        made for free.
        """
        session, what = self._session, f"{self._session.url}/{name}"
        store = session.store

        def whole(limit: int, size: int = 0) -> bytes:
            found = session.call(
                lambda: store.read(name, limit), f"read {name}", self.stats, nbytes=size
            )
            self.stats.add(bytes=len(found))
            return found

        def part(start: int, count: int) -> bytes:
            found = bytearray(count)
            pieces = [memoryview(found)]
            session.call(
                lambda: store.read_into(name, start, pieces),
                f"read {name}",
                self.stats,
                nbytes=count,
            )
            self.stats.add(bytes=count)
            return bytes(found)

        def length() -> int:
            return session.call(lambda: store.size(name), "size", self.stats)

        if self._allow_pickle:
            data = whole(MAX_METADATA_BYTES, length())
            return data, len(data)
        size = 0
        if session.is_local:
            size = length()
        else:
            try:
                data = whole(_LARGE)
            except StorageError as error:
                # It is larger, which the store saw in what it began to read; or that failed.
                with contextlib.suppress(Exception):
                    size = length()
                if size <= _LARGE:
                    raise error from error.__cause__
        if size > _LARGE:
            count = min(FOOT_BYTES if session.is_local else _TAIL, size)
            data = part(size - count, count)
            if session.is_local:
                check_ends(part(0, HEAD_BYTES), data[-TAIL_BYTES:], size, what)
        else:
            if session.is_local:
                data = whole(MAX_METADATA_BYTES)
            size = len(data)
        start = index_start(data, size, what)
        if start is None:
            data = data if len(data) == size else whole(MAX_METADATA_BYTES, size)
            return data, len(data)
        rest = size - len(data) - start
        return (part(start, rest) + data if rest > 0 else data[-rest:]), size
