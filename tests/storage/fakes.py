"""Stores that record, fail, stall and count, with a real one underneath."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from dcp_fsdp_osd.storage.local_store import LocalStore
from dcp_fsdp_osd.storage.store import Commit, Limits, Seen, StoreConfig, Upload


class Killed(BaseException):
    """Stands for the end of the process: nothing after it runs, not even cleaning up."""


@dataclass
class Script:
    """What happens to the calls of all stores that share it; thread-safe.

    Attributes:
        before: called with (operation, name) before each call; may raise or sleep.
        after: the same, after the call has taken effect.
        calls: what was called, in order.
        held: bytes handed to calls that run now, and the most there were.
    """

    before: Callable[[str, str], None] = lambda operation, name: None
    after: Callable[[str, str], None] = lambda operation, name: None
    limits: dict[str, Any] = field(default_factory=dict)
    calls: list[tuple[str, str, int, int]] = field(default_factory=list)
    held: int = 0
    most: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def store(self, config: StoreConfig) -> ScriptedStore:
        """The `backend` of a reader or writer."""
        return ScriptedStore(config, self)

    @contextmanager
    def step(self, operation: str, name: str, offset: int = 0, size: int = 0) -> Any:
        with self.lock:
            self.calls.append((operation, name, offset, size))
            self.held += size
            self.most = max(self.most, self.held)
        try:
            self.before(operation, name)
            yield
            self.after(operation, name)
        finally:
            with self.lock:
                self.held -= size

    def count(self, operation: str, of: str = "") -> int:
        return sum(call[0] == operation and of in ("", call[1]) for call in self.calls)


class ScriptedStore:
    """A local folder that takes its calls through a :class:`Script`."""

    def __init__(self, config: StoreConfig, script: Script) -> None:
        self._store = LocalStore(config)
        self._script = script

    @property
    def limits(self) -> Limits:
        return replace(self._store.limits, **self._script.limits)

    def read_into(
        self, name: str, offset: int, pieces: Sequence[memoryview], seen: Seen | None = None
    ) -> None:
        with self._script.step("read", name, offset, sum(map(len, pieces))):
            self._store.read_into(name, offset, pieces, seen)

    def read(self, name: str, limit: int) -> bytes:
        with self._script.step("read whole", name):
            return self._store.read(name, limit)

    def size(self, name: str) -> int:
        with self._script.step("size", name):
            return self._store.size(name)

    def sizes(self) -> dict[str, int]:
        with self._script.step("list", ""):
            return self._store.sizes()

    def create(self, name: str, part_size: int, parallel: int) -> Upload:
        with self._script.step("create", name):
            return _ScriptedUpload(
                self._store.create(name, part_size, parallel), self._script, name
            )

    def put(self, name: str, data: bytes, *, exclusive: bool) -> None:
        with self._script.step("put", name):
            self._store.put(name, data, exclusive=exclusive)

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            with self._script.step("delete", name):
                self._store.delete([name])

    def uploads(self) -> list[tuple[str, str]]:
        return self._store.uploads()

    def abort_upload(self, name: str, upload: str) -> None:
        self._store.abort_upload(name, upload)

    def commits(self) -> list[Commit]:
        with self._script.step("commits", ""):
            return self._store.commits()

    def folders(self) -> list[str]:
        with self._script.step("folders", ""):
            return self._store.folders()

    def is_transient(self, error: BaseException) -> bool:
        return self._store.is_transient(error)

    def close(self) -> None:
        pass


class _ScriptedUpload:
    def __init__(self, upload: Upload, script: Script, name: str) -> None:
        self._upload = upload
        self._script = script
        self._name = name

    def write(self, offset: int, pieces: Sequence[memoryview]) -> None:
        with self._script.step("write", self._name, offset, sum(map(len, pieces))):
            self._upload.write(offset, pieces)

    def complete(self, size: int) -> None:
        with self._script.step("complete", self._name):
            self._upload.complete(size)

    def abort(self) -> None:
        with self._script.step("abort", self._name):
            self._upload.abort()


def fail_at(number: int, error: Callable[[], BaseException]) -> Callable[[str, str], None]:
    """Fails the call of that number, counted from 0; for `error` Killed all later ones too."""
    lock = threading.Lock()
    count = 0

    def step(operation: str, name: str) -> None:
        nonlocal count
        with lock:
            now = count
            count += 1
        raised = error()
        if now == number or (now > number and isinstance(raised, Killed)):
            raise raised

    return step


def fail_first(
    operation: str, times: int, error: Callable[[], BaseException], *, of: str = ""
) -> Callable[[str, str], None]:
    """Fails the first `times` calls of an operation, on the file `of` if given."""
    lock = threading.Lock()
    left = times

    def step(called: str, name: str) -> None:
        nonlocal left
        if called != operation or of not in ("", name):
            return
        with lock:
            left -= 1
            fails = left >= 0
        if fails:
            raise error()

    return step


def hang(operation: str, seconds: float) -> Callable[[str, str], None]:
    """Makes an operation take that long."""

    def step(called: str, name: str) -> None:
        if called == operation:
            time.sleep(seconds)

    return step
