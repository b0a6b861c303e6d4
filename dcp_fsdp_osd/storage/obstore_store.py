"""S3, GCS and Azure through obstore, the Rust object_store client (the ``obstore`` extra).

Requests run on obstore's own threads without the GIL.  `storage_options` are obstore's own
configuration keys (``access_key_id``, ``region``, ``endpoint``, ...), with ``client_options``,
``retry_config`` and ``credential_provider`` as in ``obstore.store.from_url``.
"""

from __future__ import annotations

import contextlib
import queue
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

from dcp_fsdp_osd.errors import StorageError
from dcp_fsdp_osd.storage.store import Commit, Limits, StoreConfig, causes, scatter

__all__ = ["ObstoreStore", "serves"]

_SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl")
# What s3fs, gcsfs and adlfs call things: options that have one of these are meant for fsspec.
_FSSPEC_OPTIONS = {
    "account_key", "account_name", "anon", "cache_regions", "client_kwargs", "config_kwargs",
    "connection_string", "default_block_size", "endpoint_url", "key", "password", "profile",
    "project", "requester_pays", "s3_additional_kwargs", "secret", "session", "token", "use_ssl",
    "username",
}  # fmt: skip


def serves(config: StoreConfig) -> bool:
    """Whether obstore is installed, knows the URL's scheme, and the options are not fsspec's."""
    if config.url.partition("://")[0] not in _SCHEMES or _FSSPEC_OPTIONS & set(config.options):
        return False
    try:
        import obstore  # noqa: F401
    except ImportError:
        return False
    return True


class ObstoreStore:
    """A key prefix in a bucket or container.

    Files are uploaded as streams: obstore cuts them into multipart parts, sends some of them at a
    time, and aborts the upload when the stream fails.
    """

    def __init__(self, config: StoreConfig) -> None:
        try:
            import obstore
            from obstore.store import from_url
        except ImportError as error:
            raise StorageError(
                "backend='obstore' needs obstore: pip install 'dcp-fsdp-osd[obstore]'"
            ) from error
        self._obs = obstore
        options = dict(config.options)
        seconds = timedelta(seconds=max(config.stall_seconds / 3, 0.1))
        client = dict(options.pop("client_options", None) or {})
        client.setdefault("timeout", seconds)
        client.setdefault("connect_timeout", min(seconds, timedelta(seconds=10)))
        retry = options.pop("retry_config", None) or {
            "max_retries": 4,
            "retry_timeout": timedelta(seconds=config.stall_seconds),
        }
        try:
            self._store = from_url(config.url, client_options=client, retry_config=retry, **options)
        except Exception as error:
            raise StorageError(
                f"obstore cannot open {config.url!r}: {type(error).__name__}; its options are "
                "those of obstore.store.from_url (backend='fsspec' takes s3fs's)"
            ) from None
        # A file's parts are sent by obstore, this many at a time; each is one copy in its memory.
        self._parallel = max(2, min(config.concurrency, 8))
        self.limits = Limits(
            order="stream",
            read_copies=1,
            write_copies=self._parallel + 2,
            gap=1 << 17,
            min_part=5 << 20,
            max_parts=10_000,
        )

    def read_into(self, name: str, offset: int, pieces: Sequence[memoryview]) -> None:
        size = sum(map(len, pieces))
        if size:
            data = self._obs.get_range(self._store, name, start=offset, length=size)
            scatter(memoryview(data), pieces)
