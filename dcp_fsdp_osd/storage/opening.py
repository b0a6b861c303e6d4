"""The store of a path or URL: which backend serves it.

To add a store: a class with the methods of :class:`~dcp_fsdp_osd.storage.store.Store`, opened here.
"""

from __future__ import annotations

from dcp_fsdp_osd.errors import StorageError
from dcp_fsdp_osd.storage.location import is_local
from dcp_fsdp_osd.storage.redact import display_url
from dcp_fsdp_osd.storage.store import Store, StoreConfig

__all__ = ["open_store"]


def open_store(config: StoreConfig) -> Store:
    """The store of a path or URL.

    A function as the backend makes it.  ``auto`` takes local access for paths, obstore for URLs
    that it serves where it is installed, else fsspec.

    Raises:
        StorageError: no backend serves the URL, or the one asked for is not installed.
    """
    if callable(config.backend):
        return config.backend(config)
    backend = config.backend
    if backend not in ("auto", "fsspec", "local", "obstore"):
        raise StorageError(
            f"backend={backend!r} is unknown; expected 'auto', 'local', 'fsspec' or 'obstore'"
        )
    here = is_local(config.url)
    if backend == "local" or (backend == "auto" and here):
        from dcp_fsdp_osd.storage.local_store import LocalStore

        if not here:
            raise StorageError(
                f"backend='local' takes a path, not the URL {display_url(config.url)!r}"
            )
        return LocalStore(config)
    if backend in ("auto", "obstore"):
        from dcp_fsdp_osd.storage import obstore_store

        if backend == "obstore" or obstore_store.serves(config):
            return obstore_store.ObstoreStore(config)
    from dcp_fsdp_osd.storage.fsspec_store import open_fsspec

    return open_fsspec(config)
