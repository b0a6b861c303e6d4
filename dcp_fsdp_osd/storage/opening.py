"""The store of a path or URL: which backend serves it.

To add a store: a class with the methods of :class:`~dcp_fsdp_osd.storage.store.Store`, opened here.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from dcp_fsdp_osd.errors import StorageError
from dcp_fsdp_osd.storage.aws import Credentials, find_credentials
from dcp_fsdp_osd.storage.location import is_local, split_url
from dcp_fsdp_osd.storage.options import COMMON, means_fsspec, names_credentials
from dcp_fsdp_osd.storage.redact import display_url
from dcp_fsdp_osd.storage.store import Store, StoreConfig

__all__ = ["Choice", "choose", "open_store"]


@dataclass(frozen=True)
class Choice:
    """What serves a path or URL.

    Attributes:
        backend: ``"local"``, ``"fsspec"``, ``"obstore"``, or the name of the caller's function.
        why: the reason, where ``auto`` chose between clients; else empty.
        credentials: what was found for obstore on the way.
    """

    backend: str
    why: str = ""
    credentials: Credentials | None = None


def choose(config: StoreConfig) -> Choice:
    """Which backend serves a path or URL.  Opens nothing, but may look for credentials.

    ``auto`` takes local access for paths.  For URLs it takes obstore where that is installed,
    serves the scheme and gets the credentials that fsspec's client would use, else fsspec.

    Raises:
        StorageError: the backend is unknown, or ``"local"`` for a URL.
    """
    backend = config.backend
    if callable(backend):
        return Choice(str(getattr(backend, "__name__", type(backend).__name__)))
    if backend not in ("auto", "fsspec", "local", "obstore"):
        raise StorageError(
            f"backend={backend!r} is unknown; expected 'auto', 'local', 'fsspec' or 'obstore'"
        )
    if backend == "local" and not is_local(config.url):
        raise StorageError(f"backend='local' takes a path, not the URL {display_url(config.url)!r}")
    if backend == "auto":
        return Choice("local") if is_local(config.url) else _choose_client(config)
    return Choice(backend)


def _choose_client(config: StoreConfig) -> Choice:  # noqa: PLR0911 (a table of reasons)
    from dcp_fsdp_osd.storage import obstore_store

    scheme = split_url(config.url)[0]
    if not obstore_store.serves(scheme):
        return Choice("fsspec", f"obstore does not serve {scheme}://")
    if means_fsspec(config.options, scheme):
        return Choice("fsspec", "the options are those of fsspec's client")
    if importlib.util.find_spec("obstore") is None:
        return Choice("fsspec", "obstore is not installed")
    if obstore_store.is_forked() and set(config.options) <= {*COMMON}:
        return Choice("fsspec", "obstore was used before this process was forked")
    if scheme not in ("s3", "s3a"):
        return Choice("obstore", "it is installed")
    if names_credentials(config.options):
        return Choice("obstore", "it is installed, and the options name credentials")
    try:
        found = find_credentials()
    except Exception as error:  # s3fs meets the same, and says so
        return Choice("fsspec", f"looking for credentials failed ({type(error).__name__})")
    if found is None:
        return Choice("fsspec", "no credentials were found")
    return Choice("obstore", f"it is installed, with credentials of {found.source!r}", found)


def open_store(config: StoreConfig, choice: Choice | None = None) -> Store:
    """The store of a path or URL; `choice` is what :func:`choose` said of it, if it was asked.

    A function as the backend makes it.

    Raises:
        StorageError: no backend serves the URL, or the one asked for is not installed.
    """
    if callable(config.backend):
        return config.backend(config)
    choice = choice or choose(config)
    if choice.backend == "local":
        from dcp_fsdp_osd.storage.local_store import LocalStore

        return LocalStore(config)
    if choice.backend == "obstore":
        from dcp_fsdp_osd.storage.obstore_store import ObstoreStore

        return ObstoreStore(config, choice.credentials)
    from dcp_fsdp_osd.storage.fsspec_store import open_fsspec

    return open_fsspec(config)
