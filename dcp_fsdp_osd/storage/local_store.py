"""Files of a local (or mounted) file system, by positional reads and writes."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import stat
import threading
import uuid
from collections.abc import Iterable, Sequence
from io import FileIO
from pathlib import Path

from dcp_fsdp_osd.errors import StorageError
from dcp_fsdp_osd.storage.location import local_path
from dcp_fsdp_osd.storage.memory import copy_bytes
from dcp_fsdp_osd.storage.store import Commit, Limits, Seen, StoreConfig

__all__ = ["LocalStore", "begin_writeback"]

logger = logging.getLogger(__name__)

_BEGIN_WRITE = 2  # SYNC_FILE_RANGE_WRITE
_IOV_MAX = 1024  # pieces of one pwritev, on Linux and macOS
# Linux moves at most 2 GiB - 4 KiB in one call; the loops below continue after a short transfer.


class LocalStore:
    """A folder.  With ``fsync`` each file and folder entry is on the disk before it is relied on.

    Read errors are not retried: the kernel has already done so.
    """

    limits = Limits(order="any", read_copies=0, write_copies=0, gap=1 << 12, revocable=True)

    def __init__(self, config: StoreConfig) -> None:
        self._root = Path(local_path(config.url))
        self._fsync = config.fsync

    def read_into(
        self, name: str, offset: int, pieces: Sequence[memoryview], seen: Seen | None = None
    ) -> None:
        with self._open(name) as file:
            _receive(file.fileno(), offset, pieces, seen)

    def read(self, name: str, limit: int) -> bytes:
        with self._open(name) as file:
            size = os.fstat(file.fileno()).st_size
            if size > limit:
                raise StorageError(f"{name} has {size} bytes; at most {limit} are read")
            return file.readall()

    def _open(self, name: str) -> FileIO:
        # Not blocking: opening a pipe for reading would wait for somebody who writes to it.
        fd = os.open(self._root / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        file = FileIO(fd, "rb")
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            file.close()
            raise StorageError(f"{name} is no regular file")
        return file

    def size(self, name: str) -> int:
        return (self._root / name).stat().st_size

    def sizes(self) -> dict[str, int]:
        if not self._root.is_dir():
            return {}
        found = {}
        with os.scandir(self._root) as entries:
            for entry in entries:
                # Other saves delete their files while this one lists.
                with contextlib.suppress(FileNotFoundError):
                    if entry.is_file():
                        found[entry.name] = entry.stat().st_size
        return found

    def create(self, name: str, part_size: int, parallel: int) -> _LocalUpload:
        path = self._root / name
        _make_folder(path.parent, self._fsync)
        return _LocalUpload(path, self._fsync)

    def put(self, name: str, data: bytes, *, exclusive: bool) -> None:
        path = self._root / name
        _make_folder(path.parent, self._fsync)
        if not data and not exclusive:
            path.touch()  # a note to others who save now: it need not outlive a crash
            return
        temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
        upload = _LocalUpload(temporary, self._fsync)
        try:
            upload.write(0, [memoryview(data)])
            upload.complete(len(data))
            if exclusive:
                _rename_exclusive(temporary, path)
            else:
                temporary.replace(path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()
            raise
        if self._fsync:
            _sync_folder(path.parent)

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                (self._root / name).unlink()

    def uploads(self) -> list[tuple[str, str]]:
        return []

    def abort_upload(self, name: str, upload: str) -> None:
        raise NotImplementedError

    def commits(self) -> list[Commit]:
        found = []
        if self._root.is_dir():
            for path in self._root.iterdir():
                try:
                    about = (path / ".metadata").stat()
                except (FileNotFoundError, NotADirectoryError):
                    continue
                except OSError as error:
                    # A folder of another user, or a loop of links: no checkpoint of ours.
                    if error.errno not in (errno.EACCES, errno.EPERM, errno.ELOOP):
                        raise
                    logger.warning("%s: not looked at: %s", path, error.strerror)
                    continue
                if stat.S_ISREG(about.st_mode):
                    found.append(Commit(path.name, about.st_mtime_ns / 1e9))
        return found

    def folders(self) -> list[str]:
        if not self._root.is_dir():
            return []
        with os.scandir(self._root) as entries:
            return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]

    def is_transient(self, error: BaseException) -> bool:
        return isinstance(error, InterruptedError | TimeoutError | ConnectionError)

    def close(self) -> None:
        pass


class _LocalUpload:
    def __init__(self, path: Path, fsync: bool) -> None:
        self._path = path
        self._fsync = fsync
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        # The number of a closed file is given to the next one that is opened.  A thread that was
        # left behind in a stalled write must not find it: the last one out closes the file.
        self._lock = threading.Lock()
        self._writing = 0
        self._over = False

    def write(self, offset: int, pieces: Sequence[memoryview]) -> None:
        with self._lock:
            if self._over:
                raise StorageError(f"{self._path.name}: the save is over")
            self._writing += 1
        try:
            _transfer(self._fd, offset, pieces)
            if self._fsync:
                begin_writeback(self._fd, offset, sum(map(len, pieces)))
        finally:
            with self._lock:
                self._writing -= 1
                self._close_if_unused()

    def complete(self, size: int) -> None:
        found = os.fstat(self._fd).st_size
        if found != size:
            raise StorageError(f"{self._path.name} has {found} bytes, expected {size} written")
        if self._fsync:
            os.fsync(self._fd)
        self._end()
        if self._fsync:
            _sync_folder(self._path.parent)

    def abort(self) -> None:
        self._end()
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()

    def _end(self) -> None:
        with self._lock:
            self._over = True
            self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._over and not self._writing and self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


_CHUNK = 1 << 19  # stays in a core's cache on its way from the kernel to where it belongs
_idle = threading.local()


def _receive(fd: int, offset: int, pieces: Sequence[memoryview], seen: Seen | None) -> None:
    """Fill `pieces` by way of memory of this thread's own.

    A read may hang for minutes, in a system call that cannot be called off.  When it wakes up, the
    load may long be over and its tensors somebody else's.  So the kernel is given no memory that
    anybody else looks at, and `pieces` that were released raise ValueError here.
    """
    chunk = getattr(_idle, "chunk", None)
    if chunk is None:
        chunk = _idle.chunk = memoryview(bytearray(_CHUNK))
    first, filled = 0, 0
    left = sum(map(len, pieces))
    while left:
        done = os.preadv(fd, [chunk[: min(left, _CHUNK)]], offset)
        if done == 0:
            raise EOFError(f"the file ends at byte {os.fstat(fd).st_size}")
        if seen is not None:
            seen(chunk[:done])
        left -= done
        offset += done
        at = 0
        while at < done:
            piece = pieces[first]
            count = min(len(piece) - filled, done - at)
            copy_bytes(piece, filled, chunk, at, count)
            at += count
            filled += count
            if filled == len(piece):
                first, filled = first + 1, 0


def _transfer(fd: int, offset: int, pieces: Sequence[memoryview]) -> None:
    todo = [piece for piece in pieces if len(piece)]
    first = 0
    while first < len(todo):
        batch = todo[first : first + _IOV_MAX]
        done = os.pwritev(fd, batch, offset)
        if done == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        offset += done
        for piece in batch:
            if done < len(piece):
                todo[first] = piece[done:]
                break
            done -= len(piece)
            first += 1


def begin_writeback(fd: int, offset: int, count: int) -> bool:
    """Begin to write `count` bytes from `offset` on to the disk; False where that cannot be asked.

    The disk is then busy while the rest is still being written to memory, and the fsync at the end
    finds less to do.  It promises nothing: that fsync does, and reports what failed.  Of Linux
    alone (``sync_file_range``, which PostgreSQL and RocksDB use so).
    """
    call = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if call is None:
        return False
    call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return bool(call(fd, offset, count, _BEGIN_WRITE) == 0)


def _rename_exclusive(source: Path, target: Path) -> None:
    try:
        os.link(source, target)  # atomic, and fails where the target exists
    except FileExistsError:
        raise
    except OSError:
        # No hard links here (some network and FUSE file systems): not atomic against a second
        # writer, still atomic for readers.
        if target.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from None
        source.replace(target)
    else:
        source.unlink()


def _make_folder(path: Path, fsync: bool) -> None:
    """Make a folder and those above it; with `fsync` their entries are on the disk."""
    missing = []
    above = path
    while not above.exists():
        missing.append(above)
        above = above.parent
    path.mkdir(parents=True, exist_ok=True)
    if fsync:
        for made in reversed(missing):
            _sync_folder(made.parent)


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # not possible on this file system
            raise
    finally:
        os.close(fd)
