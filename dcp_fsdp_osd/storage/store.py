"""What a backend has to do, and nothing more.

A :class:`Store` is one folder (or key prefix) of files.  It leaves out: appending, renaming and
partial overwriting (object stores have none of them; the commit needs one atomic `put`),
permissions and modification times (`latest` alone wants them, through :meth:`Store.commits`),
retries (``transfer.py`` does those, by :meth:`Store.is_transient`), and any knowledge of
checkpoints.  Names are relative, ``/``-separated, and have been checked by the caller.

Stores are thread-safe.  They are made lazily in the process that uses them and never pickled:
clients hold sockets, threads and event loops, which survive neither a fork nor a pickle.  Errors:
``FileNotFoundError`` for a missing file, ``FileExistsError`` from an exclusive `put`,
``PermissionError`` for denied access, ``EOFError`` for a file shorter than the range read;
anything else as the client raises it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias
from urllib.parse import unquote

from dcp_fsdp_osd.errors import StorageError, UnsafeCheckpointError
from dcp_fsdp_osd.storage.redact import display_url

__all__ = [
    "Backend",
    "Commit",
    "Limits",
    "NoRetryError",
    "Store",
    "StoreConfig",
    "Upload",
    "causes",
    "check_name",
    "check_range",
    "scatter",
    "upload_seconds",
]

_PART = 8 << 20

Backend: TypeAlias = (
    "Literal['auto', 'fsspec', 'local', 'obstore'] | Callable[[StoreConfig], Store]"
)


@dataclass(frozen=True)
class Limits:
    """How a store likes to be used; bytes unless said otherwise.

    Attributes:
        order: how :meth:`Upload.write` must be called: ``"any"`` offset and length, at once;
            ``"parts"``: pieces of exactly the writer's part size but the last, at once;
            ``"queue"``: the same, begun in order;
            ``"stream"``: in order, one after the other.
        read_copies, write_copies: how many copies of a piece the client itself makes.
        gap: ranges this close together are read as one.
        revocable: :meth:`Store.read_into` touches the pieces by short assignments alone, so that
            one that hangs can be kept from them by releasing them.  Other stores are given memory
            that is used for nothing else.
        min_part, max_parts: bounds of a multipart upload.
        patience: how many stall limits may go by before one of the requests under way ends, where
            those of a rank share a slow line and none carries more than 8 MiB; the client tells
            silence from slowness as it can.
    """

    order: Literal["any", "parts", "queue", "stream"]
    read_copies: int
    write_copies: int
    gap: int
    revocable: bool = False
    min_part: int = 1
    max_parts: int = 1 << 40
    patience: int = 1

    def patience_for(self, nbytes: int) -> int:
        """:attr:`patience` with requests that carry `nbytes`; 1 where that is 1."""
        return 1 if self.patience == 1 else self.patience * max(1, -(-nbytes // _PART))


@dataclass(frozen=True)
class Commit:
    """A ``.metadata`` file below a prefix: the folder that holds it, and when it was written."""

    folder: str
    modified: float


@dataclass(frozen=True, repr=False)
class StoreConfig:
    """All that is needed to open a store again, in any process.  `options` may hold secrets."""

    url: str
    backend: Backend = "auto"
    options: Mapping[str, Any] = field(default_factory=dict)
    stall_seconds: float = 60.0
    fsync: bool = True
    concurrency: int = 8

    def __repr__(self) -> str:
        return f"{type(self).__name__}({display_url(self.url)!r}, backend={self.backend!r})"


class NoRetryError(Exception):
    """What caused it cannot be helped by making the same call again: part of it took effect.

    Not for users: ``transfer.retrying`` reports the cause.
    """


Seen = Callable[[memoryview], None]


class Upload(Protocol):
    """A file being written.  It exists for readers after :meth:`complete` at the latest.

    Calls may be repeated after an error, unless it is a :class:`NoRetryError`.
    """

    def write(self, offset: int, pieces: Sequence[memoryview]) -> None:
        """Write `pieces`, one after the other, from byte `offset` on.

        Thread-safe unless the store's order is ``"stream"``.  The memory is free again on return.
        """

    def complete(self, size: int) -> None:
        """All `size` bytes are written: make the file durable.  Called once, after all writes."""

    def abort(self) -> None:
        """Leave nothing behind, not even parts.  Called at most once, instead of `complete`."""


class Store(Protocol):
    @property
    def limits(self) -> Limits:
        """How this store likes to be used."""

    def read_into(
        self, name: str, offset: int, pieces: Sequence[memoryview], seen: Seen | None = None
    ) -> None:
        """Fill `pieces`, one after the other, with the file's bytes from `offset` on.

        `seen` is called with these bytes, in order, in parts of any length: while they are in the
        CPU's cache, if the store has them there.
        """

    def read(self, name: str, limit: int) -> bytes:
        """A whole file; ``StorageError`` if it has more than `limit` bytes."""

    def size(self, name: str) -> int:
        """The file's length now, never from a cache."""

    def sizes(self) -> dict[str, int]:
        """Names and lengths of the files directly in the folder, never from a cache."""

    def create(self, name: str, part_size: int, parallel: int) -> Upload:
        """Begin a new file, and the folder if need be.

        At most about `parallel` parts of it need to be under way at a time.
        """

    def put(self, name: str, data: bytes, *, exclusive: bool) -> None:
        """Write a small file in one atomic and durable step: readers see the old or the new one.

        With `exclusive`, an existing file is a ``FileExistsError`` and stays as it is.  Some
        servers ignore the condition: whoever can know by other means looks first.
        """

    def delete(self, names: Iterable[str]) -> None:
        """Delete files; missing ones are no error."""

    def uploads(self) -> list[tuple[str, str]]:
        """Name and id of the multipart uploads under way directly in the folder."""

    def abort_upload(self, name: str, upload: str) -> None:
        """Abort one of :meth:`uploads`; one that is over is no error."""

    def commits(self) -> list[Commit]:
        """The ``.metadata`` files one folder below this one."""

    def folders(self) -> list[str]:
        """The names of the folders directly below this one, empty ones where there are such."""

    def is_transient(self, error: BaseException) -> bool:
        """Whether trying again may help."""

    def close(self) -> None:
        """Drop connections.  The store is not used afterwards."""


_BAD_NAME = re.compile(r"[\x00-\x1f\\*?\[\]]")


def check_name(name: object) -> str:
    """`name`, if it is a relative path that stays inside of the checkpoint.

    Raises:
        UnsafeCheckpointError: it is absolute, climbs with ``..``, or holds characters that some
            backend would interpret (globs, backslashes, control characters, URL schemes).
    """
    if (
        not isinstance(name, str)
        or not name
        or name.startswith(("/", "~"))
        or "://" in name
        or re.match(r"[A-Za-z]:", name)
        or _BAD_NAME.search(name)
        or any(part in ("", ".", "..") for part in name.split("/"))
        or (unquote(name) != name and not _stays_inside(unquote(name)))
    ):
        raise UnsafeCheckpointError(
            f"the checkpoint's metadata names a data file {name!r}; expected a relative path "
            "inside of the checkpoint. Do not load it unless you know where it comes from."
        )
    return name


def _stays_inside(name: str) -> bool:
    """Whether :func:`check_name` takes it: an HTTP client may read a name as a quoted one."""
    try:
        check_name(name)
    except UnsafeCheckpointError:
        return False
    return True


def upload_seconds(stall_seconds: float, nbytes: int) -> float:
    """Time limit of one request to an object store that carries `nbytes`.

    Clients do not tell what of it has gone out, so it is one for its whole length: 8 MiB in three
    stall limits, which is 47 kB/s a connection at the default of 60 s.  It is less than what
    :class:`Limits` allows, so that one lost connection is tried again before that.
    """
    return max(3 * stall_seconds, 0.1) * max(1.0, nbytes / _PART)


def scatter(
    data: bytes | memoryview, pieces: Sequence[memoryview], seen: Seen | None = None
) -> None:
    """Copy `data` into `pieces`, one after the other; `seen` sees it.

    Raises:
        EOFError: it is shorter than they are.
        StorageError: it is longer.
    """
    view = memoryview(data)
    size = sum(map(len, pieces))
    if len(view) > size:
        raise StorageError(
            f"asked for {size} bytes, received {len(view)}: the server (or a proxy) ignores ranges"
        )
    if len(view) != size:
        raise EOFError(f"asked for {size} bytes, received {len(view)}")
    if seen is not None:
        seen(view)
    position = 0
    for piece in pieces:
        piece[:] = view[position : position + len(piece)]
        position += len(piece)


def causes(error: BaseException) -> Iterator[BaseException]:
    """An error, what caused it, and so on."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def check_range(answer: str | None, name: str, start: int, end: int, length: int | None) -> None:
    """Compare the Content-Range of an answer to a request for bytes [start, end) of a file.

    `length` is the answer's Content-Length, if it has one.

    Raises:
        EOFError: the file is shorter.
        StorageError: it is an answer to another request.
    """
    asked = f"{name}: asked for bytes {start} to {end}"
    if answer is None:
        if start == 0 and length == end:
            return  # all of the file, said so
        raise StorageError(
            f"{asked}, the answer has no Content-Range: the server (or a proxy) ignores ranges"
        )
    found = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", answer.strip())
    if found and int(found[1]) == start:
        if int(found[2]) == end - 1:
            return
        if found[3] == str(int(found[2]) + 1) and int(found[3]) < end:
            raise EOFError(f"the file has {found[3]} bytes")
    raise StorageError(
        f"{asked}, the answer is {answer!r}: the server (or a proxy) sends other bytes"
    )
