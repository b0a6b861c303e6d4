"""What the reader and the writer have in common: a store that is opened where it is used."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from dcp_fsdp_osd.errors import StorageError, message_of, survives_pickling
from dcp_fsdp_osd.storage.level import Level
from dcp_fsdp_osd.storage.location import is_local, resolve, split_url
from dcp_fsdp_osd.storage.opening import Choice, choose, open_store
from dcp_fsdp_osd.storage.redact import cleaned, display_url, redact, url_secrets
from dcp_fsdp_osd.storage.store import Backend, Store, StoreConfig
from dcp_fsdp_osd.storage.transfer import RetryPolicy, Stats, bounded, retrying

__all__ = ["LONG", "SYNCED", "Session", "accepts", "make_session", "portable_errors", "telling"]

logger = logging.getLogger(__name__)
T = TypeVar("T")
P = ParamSpec("P")
_REMOTE_THREADS = 16
_LOCAL_MOST = 32
_PER_STALL = 64 << 20  # bytes that one call moves within a stall limit, or storage is too slow

LONG = 4
"""Stall limits for a call that goes through many files without a sign of life."""
SYNCED = 10
"""Those for one that ends with an fsync, which writes out what others wrote too."""


class Session:
    """A store's configuration, and the store once this process has used it.

    Picklable and fork-safe: clients are never carried into another process, each opens its own.
    """

    def __init__(
        self,
        config: StoreConfig,
        policy: RetryPolicy,
        *,
        concurrency: int | None,
        local_threads: int,
    ) -> None:
        self.config = config
        self.policy = policy
        self.rank = 0
        self._concurrency = concurrency
        self._local_threads = local_threads
        self._store: Store | None = None
        self._pid = 0
        self._choice: Choice | None = None
        self._chose_in = 0  # process

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_store": None, "_choice": None}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def describe(self) -> str:
        """Where it is and how it is reached, without a secret."""
        backend = self.config.backend
        name = backend if isinstance(backend, str) else choose(self.config).backend
        return f"{self.url!r}, backend={name!r}"

    @property
    def url(self) -> str:
        """The path or URL, fit to be shown."""
        return display_url(self.config.url)

    @property
    def secrets(self) -> Mapping[str, Any]:
        """Options and parts of the URL that must not be shown."""
        return {**self.config.options, "url": url_secrets(self.config.url)}

    @property
    def is_local(self) -> bool:
        """Whether it is the local (or a mounted) file system."""
        return is_local(self.config.url)

    @property
    def store(self) -> Store:
        """The store of this process, opened on first use."""
        if not self.config.url:
            raise StorageError(
                "no path or URL: pass one, or a checkpoint_id to dcp.save or dcp.load"
            )
        if self._store is None or self._pid != os.getpid():
            # After a fork the parent's client is left alone, not closed: its sockets are shared.
            self._store = open_store(self.config, self._chosen())
            self._pid = os.getpid()
        return self._store

    @property
    def backend(self) -> str:
        """What serves the path or URL: ``"local"``, ``"obstore"``, ``"fsspec"`` or the name of the
        caller's function; ``"auto"`` while there is no path or URL to choose for.
        """
        return self._chosen().backend if self.config.url else "auto"

    def _chosen(self) -> Choice:
        # A forked process may need another one.
        if self._choice is None or self._chose_in != os.getpid():
            self._choice, self._chose_in = choose(self.config), os.getpid()
            if self._choice.why:
                logger.info(
                    "%s: backend='auto' chose %r: %s",
                    self.url,
                    self._choice.backend,
                    self._choice.why,
                )
        return self._choice

    def level(self) -> Level:
        """How many requests to have under way at a time: what the user said, or for a local path
        (which may be mounted from a network) what pays.
        """
        first = self.config.concurrency
        return Level(first, None if self._concurrency or not self.is_local else _LOCAL_MOST)

    def move_to(self, path_or_url: str | os.PathLike[str]) -> None:
        """Use another folder, with the same options, from now on."""
        url = resolve(path_or_url)
        self.close()
        self._choice = None
        # What comes from the page cache costs a core's time, which more threads cut into pieces.
        local = min(self._local_threads, _cores())
        threads = local if is_local(url) else _REMOTE_THREADS
        self.config = replace(self.config, url=url, concurrency=self._concurrency or threads)

    def close(self) -> None:
        """Drop connections; the next use opens new ones."""
        store, self._store = self._store, None
        if store is not None and self._pid == os.getpid():
            store.close()

    def portable(self, error: BaseException) -> BaseException:
        """`error`, or one to be raised in its place, outside of the ``except`` block: without
        secrets, and a StorageError of its text if it does not survive pickling.
        """
        error = cleaned(error, self.secrets)
        if survives_pickling(error):
            return error
        kind = f"{type(error).__module__}.{type(error).__qualname__}"
        text = redact(message_of(error), self.secrets)
        portable = StorageError(f"{self.url}: rank {self.rank}: {kind}: {text[:500]}")
        portable.__cause__ = error
        return portable

    def call(
        self,
        call: Callable[[], T],
        what: str,
        stats: Stats,
        stopped: Callable[[], bool] = lambda: False,
        *,
        nbytes: int = 0,
        patience: int = 1,
    ) -> T:
        """`call()` with this session's retries and its stall limit; `what` names the operation in
        errors.

        Each try runs on a thread of its own, which is left behind when it hangs.  Those that move
        `nbytes` may take several stall limits, and `patience` of them in any case.

        Raises:
            StalledError: there was no answer in time.
        """
        limits = self.store.limits
        stalls = max(patience, limits.patience_for(nbytes), -(-nbytes // _PER_STALL))
        one = functools.partial(
            bounded,
            call,
            stall=self.config.stall_seconds * stalls,
            what=f"{self.url}: rank {self.rank}: {what}",
        )
        return self.retried(one, what, stats, stopped)

    def retried(
        self,
        call: Callable[[], T],
        what: str,
        stats: Stats,
        stopped: Callable[[], bool] = lambda: False,
    ) -> T:
        """:meth:`call` in this thread and without a limit: for tasks of a Pool, which has one."""
        return retrying(
            call,
            store=self.store,
            policy=self.policy,
            stats=stats,
            what=f"{self.url}: {what}",
            rank=self.rank,
            secrets=self.secrets,
            stopped=stopped,
        )


class _HasSession(Protocol):
    _session: Session


S = TypeVar("S", bound=_HasSession)


def portable_errors(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """A method of a reader or writer whose errors are :meth:`Session.portable`."""

    @functools.wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(self, *args, **kwargs)
        except BaseException as error:
            portable = self._session.portable(error)
            if portable is error:
                raise
        raise portable

    return call


@contextlib.contextmanager
def telling(planner: object) -> Iterator[None]:
    """While a plan is read: tell the planner of an error at once, if it has ``on_read_error``."""
    try:
        yield
    except BaseException as error:
        on_read_error = getattr(planner, "on_read_error", None)
        if callable(on_read_error):
            on_read_error(error)
        raise


def make_session(
    path_or_url: str | os.PathLike[str] | None,
    *,
    backend: Backend = "auto",
    storage_options: Mapping[str, Any] | None = None,
    stall_seconds: float = 60.0,
    fsync: bool = False,
    concurrency: int | None = None,
    local_threads: int = 4,
    retry: RetryPolicy | None = None,
) -> Session:
    """The session that the arguments of a reader or writer describe.  Opens nothing.

    `local_threads` is the concurrency for a local path where none is given, but no more than there
    are cores.
    """
    config = StoreConfig(
        url="",
        backend=backend,
        options=dict(storage_options or {}),
        stall_seconds=stall_seconds,
        fsync=fsync,
    )
    session = Session(
        config, retry or RetryPolicy(), concurrency=concurrency, local_threads=local_threads
    )
    session.move_to("" if path_or_url is None else path_or_url)
    return session


def _cores() -> int:
    """That this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def accepts(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Whether it is a path, or a URL of a scheme that fsspec or obstore knows."""
    try:
        scheme = split_url(resolve(checkpoint_id))[0]
    except (StorageError, TypeError):
        return False
    from fsspec.registry import known_implementations, registry

    return not scheme or scheme in known_implementations or scheme in registry
