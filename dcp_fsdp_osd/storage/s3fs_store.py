"""S3 through s3fs: ranged GETs into the destination, multipart parts in parallel.

s3fs runs one event loop in a thread of its own; our threads submit coroutines to it and wait, with
a time limit on each request.  Retries are ours: s3fs's and botocore's are turned down, unless the
caller configured them.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from botocore.config import Config
from s3fs import S3FileSystem

from dcp_fsdp_osd.errors import StorageError
from dcp_fsdp_osd.storage.aws import list_uploads
from dcp_fsdp_osd.storage.options import for_s3fs
from dcp_fsdp_osd.storage.store import (
    Commit,
    Limits,
    Seen,
    StoreConfig,
    causes,
    check_range,
    upload_seconds,
)

__all__ = ["S3fsStore", "s3fs_options"]

T = TypeVar("T")
_CHUNK = 1 << 18
_READ = 8 << 20
_NO_LIMIT = 86_400
_RETRIED = {
    "500", "502", "503", "504", "InternalError", "OperationAborted", "RequestTimeout",
    "RequestTimeTooSkewed", "ServiceUnavailable", "SlowDown", "Throttling", "ThrottlingException",
    "TooManyRequests", "ConditionalRequestConflict", "XAmzContentSHA256Mismatch", "BadDigest",
}  # fmt: skip
_LOST = (
    "ConnectionError", "TimeoutError", "ClosedError", "StreamingError", "HTTPClientError",
    "ParserError", "ConnectTimeout", "IncompleteReadError",
)  # fmt: skip
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"}


def s3fs_options(config: StoreConfig) -> dict[str, Any]:
    """The caller's options, and what we set where the caller set nothing.

    fsspec keeps one file system for equal options in each process and thread, so that a client is
    made once.  These options are unlike anybody else's, so nobody else's file system is changed.
    """
    seconds = request_seconds(config)
    defaults: dict[str, Any] = {
        "connect_timeout": min(10.0, seconds),
        "read_timeout": _NO_LIMIT,  # shorter ones are ours, which know of progress
        "max_pool_connections": config.concurrency + 2,
        "retries": {"total_max_attempts": 1},
    }
    if "request_checksum_calculation" in Config.OPTION_DEFAULTS:  # botocore >= 1.36
        # Entries carry checksums of their own; one more would be computed on s3fs's only thread.
        defaults["request_checksum_calculation"] = "when_required"
    given = for_s3fs(config.options, S3FileSystem)
    return {**given, "config_kwargs": {**defaults, **(given.get("config_kwargs") or {})}}


def request_seconds(config: StoreConfig) -> float:
    """How long nothing may be heard of a request."""
    return max(config.stall_seconds / 3, 0.1)


class _Life:
    """When something was last heard of a request."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._last = time.monotonic()

    def sign(self) -> None:
        self._last = time.monotonic()

    def left(self) -> float:
        """Seconds until its silence has lasted too long."""
        return self._last + self.seconds - time.monotonic()


class S3fsStore:
    """A key prefix in a bucket."""

    limits = Limits(
        order="parts",
        read_copies=0,
        write_copies=1,
        gap=1 << 17,
        revocable=True,
        min_part=5 << 20,
        max_parts=10_000,
        patience=4,
    )

    def __init__(self, config: StoreConfig, fs: Any, path: str) -> None:
        self._seconds = request_seconds(config)
        self._stall = config.stall_seconds
        self._fs = fs
        fs.retries = 1
        # A '?versionId=' in a folder's name is a part of it.
        self.bucket, key, _ = fs.split_path(path.replace("?", "_").rstrip("/") + "/")
        self._prefix = f"{path}/"[-len(key) :] if key else ""
        self._idle: list[bytearray] = []

    def call(self, method: str, **kwargs: Any) -> Any:
        """One S3 API call on this bucket; blocks."""
        # While a body is sent nothing is heard of it, and sixteen parts share one slow line.
        body = kwargs.get("Body")
        seconds = self._seconds if body is None else upload_seconds(self._stall, len(body))
        return self.run(
            lambda: self._fs._call_s3(method, Bucket=self.bucket, **kwargs), _Life(seconds)
        )

    def run(self, start: Callable[[], Awaitable[T]], life: _Life | None = None) -> T:
        """Run a coroutine on s3fs's loop for as long as `life` shows signs of life."""
        alive = life or _Life(self._seconds)

        async def limited() -> T:
            task = asyncio.ensure_future(start())
            try:
                while not task.done():
                    left = alive.left()
                    if left <= 0:
                        raise TimeoutError(f"nothing was heard for {alive.seconds:.1f} s")
                    await asyncio.wait({task}, timeout=left)
                return task.result()
            finally:
                task.cancel()

        future = asyncio.run_coroutine_threadsafe(limited(), self._fs.loop)
        while True:
            try:
                return future.result(max(alive.left(), 0) + 5)
            except (TimeoutError, concurrent.futures.TimeoutError):
                if future.done():
                    raise
                if alive.left() < -4:  # the loop itself hangs
                    future.cancel()
                    raise TimeoutError("s3fs's event loop does not run") from None

    def joined(self, pieces: Sequence[memoryview]) -> bytearray:
        """`pieces`, one after the other, in a buffer that :meth:`give_back` may get again."""
        size = sum(map(len, pieces))
        try:
            body = self._idle.pop()
        except IndexError:
            body = bytearray()
        if len(body) != size:
            body = bytearray(size)
        position, view = 0, memoryview(body)
        for piece in pieces:
            view[position : position + len(piece)] = piece
            position += len(piece)
        return body

    def give_back(self, body: bytearray) -> None:
        """Keep a buffer of :meth:`joined`, which nothing reads any more, until :meth:`forget`."""
        self._idle.append(body)

    def forget(self) -> None:
        """Free buffers that are not in use."""
        self._idle.clear()

    def key(self, name: str) -> str:
        return f"{self._prefix}{name}"

    def read_into(
        self, name: str, offset: int, pieces: Sequence[memoryview], seen: Seen | None = None
    ) -> None:
        size = sum(map(len, pieces))
        if size == 0:
            return
        span = f"bytes={offset}-{offset + size - 1}"

        async def read() -> None:
            response = await self._get(name, Range=span)
            length = response["ContentLength"]
            try:
                check_range(response.get("ContentRange"), name, offset, offset + size, length)
                if length != size:
                    raise EOFError(f"asked for {size} bytes, offered {length}")
            except BaseException:
                response["Body"].close()
                raise
            await _receive(response, _Filler(pieces), size, life)

        life = _Life(self._seconds)
        try:
            self.run(read, life)
        except OSError as error:
            if "InvalidRange" in _codes(error):
                raise EOFError("the range begins behind the end of the file") from error
            raise
        if seen is not None:
            for piece in pieces:
                seen(piece)

    async def _get(self, name: str, **kwargs: Any) -> Any:
        return await self._fs._call_s3(
            "get_object", Bucket=self.bucket, Key=self.key(name), **kwargs
        )

    def read(self, name: str, limit: int) -> bytes:
        async def begin() -> tuple[int, bytearray | None]:
            response = await self._get(name)
            size = int(response["ContentLength"])
            if size > min(limit, _READ):
                response["Body"].close()
                return size, None
            data = bytearray(size)
            await _receive(response, _Filler([memoryview(data)]), size, life)
            return size, data

        life = _Life(self._seconds)
        size, data = self.run(begin, life)
        if size > limit:
            raise StorageError(f"{name} has {size} bytes; at most {limit} are read")
        if data is None:
            data = bytearray(size)
            for start in range(0, size, _READ):
                self.read_into(name, start, [memoryview(data)[start : start + _READ]])
        return bytes(data)

    def size(self, name: str) -> int:
        return int(self.call("head_object", Key=self.key(name))["ContentLength"])

    def sizes(self) -> dict[str, int]:
        return {
            entry["Key"][len(self._prefix) :]: int(entry["Size"])
            for page in self._pages()
            for entry in page.get("Contents", ())
        }

    def _pages(self) -> Iterable[Mapping[str, Any]]:
        token: dict[str, str] = {}
        while True:
            page = self.call("list_objects_v2", Prefix=self._prefix, Delimiter="/", **token)
            yield page
            if not page.get("IsTruncated"):
                return
            token = {"ContinuationToken": page["NextContinuationToken"]}

    def create(self, name: str, part_size: int, parallel: int) -> _S3Upload:
        return _S3Upload(self, name, part_size)

    def put(self, name: str, data: bytes, *, exclusive: bool) -> None:
        if not exclusive:
            self.call("put_object", Key=self.key(name), Body=data)
            return
        try:
            self.call("put_object", Key=self.key(name), Body=data, IfNoneMatch="*")
            return
        except OSError as error:
            codes = _codes(error)
            if not codes & {"PreconditionFailed", "412", "NotImplemented", "501"}:
                raise
        # Not under `except`, where a new error would take on the status of the old one.
        with contextlib.suppress(FileNotFoundError):
            self.size(name)
            raise FileExistsError(name)
        if codes & {"PreconditionFailed", "412"}:
            raise ConnectionError(f"the server says that {name} exists, and that it does not")
        self.call("put_object", Key=self.key(name), Body=data)

    def uploads(self) -> list[tuple[str, str]]:
        return list_uploads(self.call, self._prefix)

    def abort_upload(self, name: str, upload: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.call("abort_multipart_upload", Key=self.key(name), UploadId=upload)

    def delete(self, names: Iterable[str]) -> None:
        keys = [{"Key": self.key(name)} for name in names]
        for start in range(0, len(keys), 1000):
            batch = {"Objects": keys[start : start + 1000], "Quiet": True}
            failed = self.call("delete_objects", Delete=batch).get("Errors")
            if failed:
                raise OSError(f"{len(failed)} files were not deleted: {failed[0].get('Code')}")

    def folders(self) -> list[str]:
        return [
            prefix["Prefix"][len(self._prefix) : -1]
            for page in self._pages()
            for prefix in page.get("CommonPrefixes", ())
        ]

    def commits(self) -> list[Commit]:
        found = []
        for folder in self.folders():
            try:
                head = self._look(f"{folder}/.metadata")
            except FileNotFoundError:
                continue
            found.append(Commit(folder, head["LastModified"].timestamp()))
        return found

    def _look(self, name: str) -> Any:
        """A HEAD that is repeated by itself, so that one error does not begin a scan anew."""
        for attempt in range(5):
            try:
                return self.call("head_object", Key=self.key(name))
            except Exception as error:
                if attempt == 4 or not self.is_transient(error):
                    raise
                time.sleep(random.uniform(0, 0.1 * 2**attempt))
        raise AssertionError("unreachable")

    def is_transient(self, error: BaseException) -> bool:
        codes = _codes(error)
        if codes & _EXPIRED:
            # New credentials may be there by now; if not, the next try says so.
            with contextlib.suppress(Exception):
                self.run(lambda: self._fs.set_session(refresh=True))
            return True
        if codes:
            return bool(codes & _RETRIED)
        return any(
            isinstance(cause, ConnectionError | TimeoutError | asyncio.TimeoutError)
            or type(cause).__module__.partition(".")[0] == "aiohttp"
            or (
                type(cause).__module__.startswith(("botocore", "aiobotocore"))
                and type(cause).__name__.endswith(_LOST)
            )
            for cause in causes(error)
        )

    def close(self) -> None:
        pass  # s3fs closes its session when it is collected


class _S3Upload:
    """One object: a single PUT if it fits into one part, else a multipart upload."""

    def __init__(self, store: S3fsStore, name: str, part_size: int) -> None:
        self._store = store
        self._name = name
        self._part_size = part_size
        self._lock = threading.Lock()
        self._upload_id: str | None = None
        self._etags: dict[int, str] = {}

    def write(self, offset: int, pieces: Sequence[memoryview]) -> None:
        # Fresh memory would cost more than the copy.
        body = self._store.joined(pieces)
        key = self._store.key(self._name)
        if offset == 0 and len(body) < self._part_size:
            self._store.call("put_object", Key=key, Body=body)
            return
        with self._lock:
            if self._upload_id is None:
                begun = self._store.call("create_multipart_upload", Key=key)
                self._upload_id = str(begun["UploadId"])
        number = offset // self._part_size + 1
        done = self._store.call(
            "upload_part", Key=key, UploadId=self._upload_id, PartNumber=number, Body=body
        )
        with self._lock:
            self._etags[number] = done["ETag"]
        # Only now: a request that failed may be read from for a while yet.
        self._store.give_back(body)

    def complete(self, size: int) -> None:
        self._store.forget()
        if self._upload_id is None:
            return
        parts = [{"PartNumber": n, "ETag": tag} for n, tag in sorted(self._etags.items())]
        try:
            self._store.call(
                "complete_multipart_upload",
                Key=self._store.key(self._name),
                UploadId=self._upload_id,
                MultipartUpload={"Parts": parts},
            )
        except OSError as error:
            # A try whose answer was lost has completed it.
            if "NoSuchUpload" not in _codes(error) or self._store.size(self._name) != size:
                raise
        self._upload_id = None

    def abort(self) -> None:
        self._store.forget()
        if self._upload_id is not None:
            self._store.call(
                "abort_multipart_upload",
                Key=self._store.key(self._name),
                UploadId=self._upload_id,
            )


async def _receive(response: Any, into: _Filler, size: int, life: _Life) -> None:
    body = response["Body"]
    try:
        while data := await body.read(_CHUNK):
            into.add(data)
            life.sign()
    finally:
        body.close()
    if into.size != size:
        raise ConnectionError(f"received {into.size} of {size} bytes")


class _Filler:
    """Copies a stream of bytes into pieces of memory, one after the other."""

    def __init__(self, pieces: Sequence[memoryview]) -> None:
        self._left = [piece for piece in reversed(pieces) if len(piece)]
        self._filled = 0  # of the piece that is filled now
        self.size = 0

    def add(self, data: bytes) -> None:
        view = memoryview(data)
        self.size += len(view)
        while view:
            if not self._left:
                raise ConnectionError("received more bytes than were asked for")
            # The pieces themselves, not views of them: they may be released by now.
            piece, begin = self._left[-1], self._filled
            count = min(len(piece) - begin, len(view))
            piece[begin : begin + count] = view[:count]
            view = view[count:]
            self._filled += count
            if self._filled == len(piece):
                self._left.pop()
                self._filled = 0


def _codes(error: BaseException) -> set[str]:
    """S3 error codes and HTTP status in an error and its causes."""
    found: set[str] = set()
    for cause in causes(error):
        response = getattr(cause, "response", None)
        if isinstance(response, Mapping):
            code = response.get("Error", {}).get("Code")
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            found |= {str(value) for value in (code, status) if value}
    return found
