"""Any file system that fsspec opens; S3 goes to ``s3fs_store.py``, which uploads in parallel."""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.asyn import sync
from fsspec.core import url_to_fs
from fsspec.implementations.http import HTTPFileSystem

from dcp_fsdp_osd.errors import StorageError
from dcp_fsdp_osd.storage.location import split_url
from dcp_fsdp_osd.storage.redact import display_url, redact
from dcp_fsdp_osd.storage.store import (
    Commit,
    Limits,
    NoRetryError,
    Seen,
    Store,
    StoreConfig,
    causes,
    check_range,
    scatter,
)

__all__ = ["FsspecStore", "open_fsspec"]

_OBJECT_STORES = {
    "abfs", "abfss", "adl", "az", "gcs", "gs", "http", "https", "memory", "oci", "oss", "s3", "s3a",
}  # fmt: skip


def open_fsspec(config: StoreConfig) -> Store:
    """The store of a URL that fsspec knows.

    Raises:
        StorageError: fsspec does not know the scheme, or its package is not installed.
    """
    options = dict(config.options)
    scheme, authority, _ = split_url(config.url)
    is_s3 = scheme in ("s3", "s3a")
    try:
        if is_s3:
            from dcp_fsdp_osd.storage.s3fs_store import S3fsStore, s3fs_options

            options = s3fs_options(config)
        # Only this far is it a URL: fsspec would take a '::' in a name for a chain.
        fs, _ = url_to_fs(f"{scheme or 'file'}://{authority}", **options)
        path = fs._strip_protocol(config.url)
    except (ImportError, ValueError) as error:
        raise StorageError(
            f"fsspec cannot open {display_url(config.url)!r}: {redact(str(error), options)}"
        ) from None
    if is_s3:
        return S3fsStore(config, fs, path)
    return FsspecStore(fs, path)


class FsspecStore:
    """A folder of an fsspec file system.  Files are written as streams, several side by side."""

    limits = Limits(order="stream", read_copies=1, write_copies=1, gap=1 << 17, revocable=True)

    def __init__(self, fs: AbstractFileSystem, path: str) -> None:
        self._fs = fs
        self._root = path.rstrip("/")

    def read_into(
        self, name: str, offset: int, pieces: Sequence[memoryview], seen: Seen | None = None
    ) -> None:
        path, end = self._path(name), offset + sum(map(len, pieces))
        if isinstance(self._fs, HTTPFileSystem):
            data = sync(self._fs.loop, _http_range, self._fs, path, offset, end)
        else:
            data = self._fs.cat_file(path, start=offset, end=end)
        scatter(data, pieces, seen)

    def read(self, name: str, limit: int) -> bytes:
        size = self.size(name)
        if size > limit:
            raise StorageError(f"{name} has {size} bytes; at most {limit} are read")
        return bytes(self._fs.cat_file(self._path(name)))

    def size(self, name: str) -> int:
        self._fs.invalidate_cache()
        return int(self._fs.info(self._path(name))["size"])

    def sizes(self) -> dict[str, int]:
        return {
            self._name(entry): int(entry["size"] or 0)
            for entry in self._ls(self._root)
            if entry["type"] == "file"
        }

    def create(self, name: str, part_size: int, parallel: int) -> _StreamUpload:
        self._fs.makedirs(self._root, exist_ok=True)
        return _StreamUpload(self._fs, self._path(name), part_size)

    def put(self, name: str, data: bytes, *, exclusive: bool) -> None:
        path = self._path(name)
        self._fs.makedirs(self._root, exist_ok=True)
        self._fs.invalidate_cache()
        # fsspec has no conditional write that all file systems keep to.
        if exclusive and self._fs.exists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        if not data or self._puts_whole:
            self._fs.pipe_file(path, data)
            return
        temporary = f"{path}.{uuid.uuid4().hex}.tmp"
        try:
            self._fs.pipe_file(temporary, data)
            self._replace(temporary, path)
        except BaseException:
            with contextlib.suppress(Exception):
                self._fs.rm_file(temporary)
            raise

    @property
    def _puts_whole(self) -> bool:
        """Whether a file appears whole or not at all: object stores; others write in place."""
        names = self._fs.protocol
        return not _OBJECT_STORES.isdisjoint([names] if isinstance(names, str) else names)

    def _replace(self, temporary: str, path: str) -> None:
        """Rename over `path`.  Where that is refused because it exists: the old file is renamed
        first, and back if the second renaming fails.
        """
        try:
            self._fs.mv(temporary, path)
            self._fs.invalidate_cache()
            if not self._fs.exists(temporary):
                return
        except Exception:
            self._fs.invalidate_cache()
            if not (self._fs.exists(path) and self._fs.exists(temporary)):
                raise
        old = f"{path}.{uuid.uuid4().hex}.tmp"
        self._fs.mv(path, old)
        try:
            self._fs.mv(temporary, path)
        except BaseException:
            self._fs.mv(old, path)
            raise
        with contextlib.suppress(Exception):
            self._fs.rm_file(old)

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._path(name))

    def uploads(self) -> list[tuple[str, str]]:
        return []

    def abort_upload(self, name: str, upload: str) -> None:
        raise NotImplementedError

    def commits(self) -> list[Commit]:
        found = []
        for entry in self._ls(self._root):
            if entry["type"] == "directory":
                path = f"{entry['name'].rstrip('/')}/.metadata"
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    if self._fs.info(path)["type"] == "directory":
                        continue
                    found.append(Commit(self._name(entry), self._modified(path)))
        return found

    def folders(self) -> list[str]:
        entries = self._ls(self._root)
        return [self._name(entry) for entry in entries if entry["type"] == "directory"]

    def is_transient(self, error: BaseException) -> bool:
        return any(
            isinstance(cause, ConnectionError | TimeoutError | InterruptedError)
            or type(cause).__module__.partition(".")[0] == "aiohttp"
            or int_or_zero(getattr(cause, "status", getattr(cause, "code", 0)))
            in (408, 429, 500, 502, 503, 504)
            for cause in causes(error)
        )

    def close(self) -> None:
        pass

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _name(self, entry: dict[str, Any]) -> str:
        return str(entry["name"]).rstrip("/").rpartition("/")[2]

    def _ls(self, path: str) -> list[dict[str, Any]]:
        self._fs.invalidate_cache()
        try:
            return list(self._fs.ls(path, detail=True))
        except FileNotFoundError:
            return []

    def _modified(self, path: str) -> float:
        try:
            return float(self._fs.modified(path).timestamp())
        except NotImplementedError:
            return 0.0


def int_or_zero(value: object) -> int:
    """A number, if it is one: clients put all kinds of things into `status` and `code`."""
    try:
        return int(value)  # type: ignore[call-overload, no-any-return]
    except (TypeError, ValueError):
        return 0


async def _http_range(fs: Any, url: str, start: int, end: int) -> bytes:
    """As ``HTTPFileSystem.cat_file``, which does not look at what the answer says that it is."""
    if start == end:
        return b""
    options = dict(fs.kwargs)
    options["headers"] = {**(options.get("headers") or {}), "Range": f"bytes={start}-{end - 1}"}
    session = await fs.set_session()
    async with session.get(fs.encode_url(url), **options) as answer:
        if answer.status == 416:
            raise EOFError("the range begins behind the end of the file")
        fs._raise_not_found_for_status(answer, url)
        said = answer.headers.get("Content-Range")
        check_range(said, display_url(url), start, end, answer.content_length)
        return bytes(await answer.read())


class _StreamUpload:
    def __init__(self, fs: AbstractFileSystem, path: str, part_size: int) -> None:
        self._fs = fs
        self._path = path
        self._file = fs.open(path, "wb", block_size=part_size)
        self._written = 0

    def write(self, offset: int, pieces: Sequence[memoryview]) -> None:
        if offset != self._written:
            raise StorageError(f"{self._path}: expected bytes from {self._written}, not {offset}")
        try:
            for piece in pieces:
                self._file.write(piece)
                self._written += len(piece)
        except Exception as error:
            raise NoRetryError from error

    def complete(self, size: int) -> None:
        if size != self._written:
            raise StorageError(f"{self._path} has {self._written} bytes, expected {size} written")
        try:
            self._file.close()
        except Exception as error:
            raise NoRetryError from error

    def abort(self) -> None:
        # Closing would upload what there is, and so would garbage collection.
        with contextlib.suppress(Exception):
            self._file.discard()
        with contextlib.suppress(Exception):
            self._file.closed = True
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path)
