"""S3, GCS and Azure through obstore, the Rust object_store client (the ``obstore`` extra).

Requests run on obstore's own threads without the GIL.  `storage_options` are those of
``options.py`` and obstore's own configuration keys, with ``client_options``, ``retry_config`` and
``credential_provider`` as in ``obstore.store.from_url``.

A forked child of a process that has used obstore cannot use it (its threads are gone): there
``auto`` takes fsspec where there are no options, and anything else is an error rather than a hang.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

from dcp_fsdp_osd.errors import StorageError
from dcp_fsdp_osd.storage.aws import Credentials, PlainS3, find_credentials
from dcp_fsdp_osd.storage.location import split_url
from dcp_fsdp_osd.storage.options import did_you_mean, for_obstore, names_credentials
from dcp_fsdp_osd.storage.redact import display_url, redact
from dcp_fsdp_osd.storage.store import (
    Commit,
    Limits,
    NoRetryError,
    Seen,
    StoreConfig,
    causes,
    scatter,
    upload_seconds,
)

__all__ = ["ObstoreStore", "is_forked", "serves"]

_READ = 8 << 20
_MANY = 64  # pieces; more of them are cheaper to copy than to hand over one by one
_SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl")

# obstore's threads belong to the process that used it first, for good.
_used_by: list[int] = []


def is_forked() -> bool:
    """Whether a process that has used obstore was forked into this one."""
    return bool(_used_by) and _used_by[0] != os.getpid()


def serves(scheme: str) -> bool:
    """Whether it is a scheme of obstore's that names a bucket."""
    return scheme in _SCHEMES


class ObstoreStore:
    """A key prefix in a bucket or container.

    obstore takes an upload as a stream: it cuts multipart parts from it, sends some of them at a
    time, retries them, and aborts the upload when the stream fails.

    `credentials` are what botocore found, where the options name none; None lets this look.
    """

    limits = Limits(
        order="queue",
        read_copies=1,
        write_copies=1,
        gap=1 << 17,
        revocable=True,
        min_part=5 << 20,
        max_parts=10_000,
        patience=4,
    )

    def __init__(self, config: StoreConfig, credentials: Credentials | None = None) -> None:
        try:
            import obstore
            from obstore.store import from_url
        except ImportError as error:
            raise StorageError(
                "backend='obstore' needs obstore: pip install 'dcp-fsdp-osd[obstore]'"
            ) from error
        if is_forked():
            raise StorageError(
                "obstore was used before this process was forked and would hang now: start "
                "processes by 'spawn' or 'forkserver', or pass backend='fsspec'"
            )
        _used_by[:] = [os.getpid()]
        self.obs: Any = obstore
        self._config = config
        self._lock = threading.Lock()
        self._plain: PlainS3 | None = None
        options = for_obstore(self._given(credentials), split_url(config.url)[0])
        open_url: Any = from_url
        # What from_url makes of a URL's path loses '#', '?' and '%': keys are made here.
        scheme, authority, prefix = split_url(config.url)
        named = scheme in _SCHEMES
        place = f"{scheme}://{authority}" if named else config.url
        stall = config.stall_seconds

        def opened(retry_seconds: float, **limits: float) -> Any:
            """A client whose requests have these time limits, seconds, but for the caller's own.

            What fails later than `retry_seconds` is not repeated by it, but by us.
            """
            found = {name: timedelta(seconds=max(value, 0.1)) for name, value in limits.items()}
            connect = {"connect_timeout": timedelta(seconds=min(max(stall / 2, 0.1), 10))}
            client = {**connect, **found, **options["client_options"]}
            retries = {"max_retries": 4, "retry_timeout": timedelta(seconds=retry_seconds)}
            given = {"retry_config": retries, **options, "client_options": client}
            return open_url(place, **given)

        self._opened = opened
        self._uploaders: dict[int, Any] = {}  # by parts' sizes
        try:
            # A read may be long, but not silent.
            whole = upload_seconds(stall, _READ)
            try:
                self.store = opened(stall / 4, timeout=whole, read_timeout=stall / 2)
            except Exception as error:  # of an older obstore, which has only limits of the whole
                if "read_timeout" not in str(error) or "read_timeout" in str(config.options):
                    raise
                self.store = opened(stall / 4, timeout=whole)
            self._prefix = f"{prefix}/" if prefix and named else ""
        except BaseException as error:  # a PanicException of Rust's is none of Exception's
            if not isinstance(error, Exception) and "Panic" not in type(error).__name__:
                raise
            said = redact(str(error).partition("\n")[0], config.options)
            name = re.search(r"key: '?(\w+)", said)
            hint = did_you_mean(name[1]) if name else "see obstore.store.from_url for its options"
            message = f"obstore cannot open {display_url(config.url)!r}: {said}; {hint}"
        else:
            return
        raise StorageError(message)

    def _given(self, found: Credentials | None) -> Mapping[str, Any]:
        """The options, with what the AWS tools would use where they name no credentials."""
        options = self._config.options
        if not self._is_s3 or names_credentials(options):
            return options
        if found is None:
            # Without them obstore looks by itself, or says what it misses.
            with contextlib.suppress(Exception):
                found = find_credentials()
        return options if found is None else found.added_to(options)

    def read_into(
        self, name: str, offset: int, pieces: Sequence[memoryview], seen: Seen | None = None
    ) -> None:
        size = sum(map(len, pieces))
        if not size:
            return
        try:
            data = self.obs.get_range(self.store, self.key(name), start=offset, length=size)
        except Exception as error:
            if _status(error) == 416:
                raise EOFError("the range begins behind the end of the file") from error
            raise
        scatter(memoryview(data), pieces, seen)

    def read(self, name: str, limit: int) -> bytes:
        begun = self.obs.get(self.store, self.key(name))
        size = int(begun.meta["size"])
        if size > limit:
            raise StorageError(f"{name} has {size} bytes; at most {limit} are read")
        if size <= _READ:
            return bytes(begun.bytes())
        data = bytearray(size)
        for start in range(0, size, _READ):
            self.read_into(name, start, [memoryview(data)[start : start + _READ]])
        return bytes(data)

    def size(self, name: str) -> int:
        return int(self.obs.head(self.store, self.key(name))["size"])

    def sizes(self) -> dict[str, int]:
        return {self._name(entry["path"]): int(entry["size"]) for entry in self._list()["objects"]}

    def create(self, name: str, part_size: int, parallel: int) -> _ObstoreUpload:
        return _ObstoreUpload(self, name, part_size, parallel)

    def uploader(self, nbytes: int) -> Any:
        """The client for requests that carry so many bytes: their time limit is another one."""
        with self._lock:
            if nbytes not in self._uploaders:
                stall = self._config.stall_seconds
                seconds = upload_seconds(stall, nbytes)
                self._uploaders[nbytes] = self._opened(seconds + stall, timeout=seconds)
            return self._uploaders[nbytes]

    def put(self, name: str, data: bytes, *, exclusive: bool) -> None:
        mode = "create" if exclusive else "overwrite"
        store = self.store if len(data) < _READ // 8 else self.uploader(len(data))
        try:
            self.obs.put(store, self.key(name), data, mode=mode, use_multipart=False)
            return
        except self.obs.exceptions.AlreadyExistsError:
            knows_conditions = True
        except Exception as error:
            if not exclusive or (_status(error) != 501 and "NotImplemented" not in str(error)):
                raise
            knows_conditions = False
        # Not under `except`, where a new error would take on the status of the old one.
        with contextlib.suppress(FileNotFoundError):
            self.size(name)
            raise FileExistsError(name)
        if knows_conditions:
            raise ConnectionError(f"the server says that {name} exists, and that it does not")
        self.put(name, data, exclusive=False)

    def uploads(self) -> list[tuple[str, str]]:
        return self._plain_s3().uploads() if self._is_s3 else []

    def abort_upload(self, name: str, upload: str) -> None:
        self._plain_s3().abort_upload(name, upload)

    def delete(self, names: Iterable[str]) -> None:
        left = [self.key(name) for name in names]
        try:
            if left:
                self.obs.delete(self.store, left)
        except FileNotFoundError:  # not from S3; then some may be left
            for key in left:
                with contextlib.suppress(FileNotFoundError):
                    self.obs.delete(self.store, key)

    def commits(self) -> list[Commit]:
        found = []
        for folder in self._list()["common_prefixes"]:
            with contextlib.suppress(FileNotFoundError):
                head = self.obs.head(self.store, f"{folder}/.metadata")
                found.append(Commit(self._name(folder), head["last_modified"].timestamp()))
        return found

    def folders(self) -> list[str]:
        return [self._name(folder) for folder in self._list()["common_prefixes"]]

    def key(self, name: str) -> str:
        return f"{self._prefix}{name}"

    def _name(self, key: str) -> str:
        return key.removeprefix(self._prefix)

    def _list(self) -> Any:
        try:
            return self.obs.list_with_delimiter(self.store, self._prefix or None)
        except self.obs.exceptions.InvalidPathError as error:
            problem = str(error).partition("\n")[0]
        except Exception as error:
            if "NoSuchBucket" in str(error) or _status(error) == 404:
                raise FileNotFoundError("no such bucket") from error
            raise
        if not self._is_s3:
            raise StorageError(
                f"another program left a key here that obstore cannot list ({problem}): delete it, "
                "use another folder, or pass backend='fsspec'"
            )
        # Others' keys are left out that obstore cannot name.
        objects: list[dict[str, Any]] = []
        folders: list[str] = []
        for page in self._plain_s3().pages():
            for each in page.get("Contents", ()):
                if _is_plain(key := str(each["Key"])):
                    objects.append({"path": key, "size": each["Size"]})
            for each in page.get("CommonPrefixes", ()):
                if _is_plain(key := str(each["Prefix"])[:-1]):
                    folders.append(key)
        return {"objects": objects, "common_prefixes": folders}

    @property
    def _is_s3(self) -> bool:
        return split_url(self._config.url)[0] in ("s3", "s3a")

    def _plain_s3(self) -> PlainS3:
        """For what obstore has no request for."""
        with self._lock:
            if self._plain is None or "credential_provider" in self._config.options:
                self._plain = PlainS3(self._config)
            return self._plain

    def is_transient(self, error: BaseException) -> bool:
        status = _status(error)
        if status is not None:
            return status in (408, 409, 429) or status >= 500 or _is_expired(error)
        if isinstance(error, ConnectionError | TimeoutError):
            return True
        return isinstance(error, self.obs.exceptions.GenericError) and bool(
            re.search(
                r"HTTP error|error sending|timed out|timeout|connection|body", str(error), re.I
            )
        )

    def close(self) -> None:
        pass


class _ObstoreUpload:
    """One object.  A thread runs obstore's put, which draws parts from us as it sends them.

    Parts are sent from the caller's own memory: obstore holds a view of it until the part has been
    received, and :meth:`write` returns when all those views are gone.
    """

    def __init__(self, store: ObstoreStore, name: str, part_size: int, parallel: int) -> None:
        self._store = store
        self._name = store.key(name)
        self._part_size = part_size
        self._parallel = parallel
        self._parts: queue.SimpleQueue[list[memoryview] | None] = queue.SimpleQueue()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dcp_fsdp_osd_put")
        self._turn = threading.Condition()
        self._next = 0  # offset of the part that is handed over next
        self._over = False
        self._sent: Future[Any] | None = None

    def write(self, offset: int, pieces: Sequence[memoryview]) -> None:
        size = sum(map(len, pieces))
        if offset == 0 and size < self._part_size:
            client = self._store.uploader(self._part_size)
            self._store.obs.put(client, self._name, iter(pieces), use_multipart=False)
            return
        many = len(pieces) > _MANY
        views = [memoryview(b"".join(pieces))] if many else [piece[:] for piece in pieces]
        with self._turn:
            # Writes begin in order, so that of the part before this one has begun.
            while self._next != offset:
                if self._over or (self._sent is not None and self._sent.done()):
                    self._raise()
                self._turn.wait(0.1)
            if self._sent is None:
                self._sent = self._thread.submit(
                    self._store.obs.put,
                    self._store.uploader(self._part_size),
                    self._name,
                    self._draw(),
                    chunk_size=self._part_size,
                    max_concurrency=self._parallel,
                )
            gone = _Gone(views)
            self._parts.put(views)
            if size < self._part_size:
                self._parts.put(None)  # the last part is sent when the stream ends
            self._next += size
            self._turn.notify_all()
        del views
        while not gone.wait(0.1):
            if self._sent.done():
                break
        if self._sent.done():
            self._await()

    def _raise(self) -> None:
        if self._sent is not None:
            self._await()
        raise StorageError(f"{self._name}: the upload ended early")

    def _await(self) -> None:
        assert self._sent is not None
        try:
            self._sent.result()
        except Exception as error:
            # What obstore drew from us is gone, so that the parts cannot be sent again.
            if not _is_expired(error):
                raise NoRetryError from error
            raise NoRetryError from StorageError(
                "the credentials expired during an upload, which obstore cannot resume: pass a "
                "credential_provider that says when they expire (expires_at), so that obstore "
                f"renews them in time, or backend='fsspec' ({type(error).__name__}: {error})"
            )

    def _draw(self) -> Iterator[memoryview]:
        """What obstore takes.  Nothing here keeps a view that was taken."""
        while (part := self._parts.get()) is not None:
            if self._over:
                raise InterruptedError("the save failed")
            part.reverse()
            while part:
                yield part.pop()

    def complete(self, size: int) -> None:
        del size  # the writer checks it before the commit
        if self._sent is not None:
            self._parts.put(None)
            self._await()
        self._thread.shutdown()

    def abort(self) -> None:
        self._over = True
        if self._sent is not None and not self._sent.done():
            self._parts.put([])
            with contextlib.suppress(Exception):
                self._sent.result()
        self._thread.shutdown(wait=False)


class _Gone:
    """Waits until nothing refers to any of some views any more."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        # A lock, because a thread may lose the last reference anywhere, and releasing is atomic.
        self._lock = threading.Lock()
        self._lock.acquire()
        left = list(range(len(views)))

        def gone(_: object) -> None:
            if left.pop() == 0:  # the last one
                self._lock.release()

        self._refs = [weakref.ref(view, gone) for view in views]

    def wait(self, seconds: float) -> bool:
        """Whether it has happened within that time."""
        return self._lock.acquire(timeout=seconds)


def _is_plain(key: str) -> bool:
    """Whether obstore takes it."""
    names = key.split("/")
    return not re.search(r"[\x00-\x1f\x7f]", key) and not {"", ".", ".."} & set(names)


def _is_expired(error: BaseException) -> bool:
    return any("ExpiredToken" in str(cause) for cause in causes(error))


def _status(error: BaseException) -> int | None:
    """The HTTP status that an error tells of in its text; obstore has no other place for it."""
    for cause in causes(error):
        found = re.search(r"status code: (\d{3})", str(cause))
        if found:
            return int(found[1])
    return None
