"""Whether a place can hold checkpoints: which client serves it, with which credentials, and what it
does when it is asked what saves and loads ask.

What is written lies in a folder of its own, which is removed again, also after errors.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from dcp_fsdp_osd.errors import message_of
from dcp_fsdp_osd.storage.aws import find_credentials
from dcp_fsdp_osd.storage.latest import commits
from dcp_fsdp_osd.storage.location import join, local_path, resolve, split_url
from dcp_fsdp_osd.storage.opening import choose
from dcp_fsdp_osd.storage.options import names_credentials
from dcp_fsdp_osd.storage.redact import redact
from dcp_fsdp_osd.storage.session import Session, make_session
from dcp_fsdp_osd.storage.store import Backend, Upload
from dcp_fsdp_osd.storage.transfer import RetryPolicy, Stats

__all__ = ["Diagnosis", "Probe", "diagnose"]

_PACKAGES = {"obstore": ("obstore",), "fsspec": ("fsspec", "s3fs"), "local": ()}
_QUICK = RetryPolicy(tries=2, seconds=10.0)
_STALL = 15.0  # seconds
_NAME = "probe.distcp"
_LARGE = "probe-parts.distcp"


@dataclass(frozen=True)
class Probe:
    """One thing that was tried.

    Attributes:
        name: what.
        ok: it is as it should be; None where that cannot be said.
        said: in words.
        seconds: it took.
    """

    name: str
    ok: bool | None
    said: str
    seconds: float


@dataclass
class Diagnosis:
    """Of one place.

    Attributes:
        url: fit to be shown.
        backend, why: what serves it, and why it was chosen.
        packages: versions of the clients.
        options: names of the storage options; never their values.
        environment: names of environment variables that clients look at, where they are set.
        credentials: where credentials were found.
        probes: in order.
    """

    url: str
    backend: str = ""
    why: str = ""
    packages: dict[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    credentials: str = ""
    probes: list[Probe] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Nothing failed."""
        return all(probe.ok is not False for probe in self.probes)


def diagnose(
    path_or_url: str | os.PathLike[str],
    *,
    backend: Backend = "auto",
    storage_options: Mapping[str, Any] | None = None,
) -> Diagnosis:
    """Try everything at a folder of checkpoints.  Failures are in what is returned.

    Raises:
        StorageError: the path or URL is none, or the backend is unknown.
    """
    options = dict(storage_options or {})
    url = _existing(resolve(path_or_url))
    arguments: dict[str, Any] = {
        "backend": backend,
        "storage_options": options,
        "retry": _QUICK,
        "stall_seconds": _STALL,
    }
    session = make_session(url, **arguments)
    chosen = choose(session.config)
    scheme = split_url(url)[0]
    prefixes = {"s3": "AWS_", "s3a": "AWS_", "gs": "GOOGLE_", "gcs": "GOOGLE_"}
    prefix = prefixes.get(scheme, "AZURE_") if not session.is_local else None
    found = Diagnosis(
        session.url,
        chosen.backend,
        chosen.why or ("it is a path" if session.is_local else "it was asked for"),
        _versions(_PACKAGES.get(chosen.backend, ())),
        tuple(sorted(map(str, options))),
        tuple(sorted(name for name in os.environ if prefix and name.startswith(prefix))),
    )
    found.credentials = _credentials(scheme, options)
    folder = f"dcp-osd-doctor-{uuid.uuid4().hex[:12]}"
    with (
        contextlib.closing(session),
        contextlib.closing(make_session(join(url, folder), **arguments)) as inside,
    ):
        found.probes += _Probes(session, inside, folder).run()
    return found


def _existing(url: str) -> str:
    """The place itself, or the folder above it that exists: nothing is left behind."""
    if split_url(url)[0] not in ("", "file", "local"):
        return url
    path = Path(local_path(url)).absolute()
    while not path.exists():
        path = path.parent
    return str(path)


def _versions(names: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _credentials(scheme: str, options: Mapping[str, Any]) -> str:
    if scheme not in ("s3", "s3a"):
        return "the client's own" if scheme not in ("", "file", "local") else "none needed"
    if names_credentials(options):
        return "in the storage options"
    try:
        found = find_credentials()
    except Exception as error:
        return f"looking for them failed: {redact(message_of(error), options)[:200]}"
    return "none found" if found is None else f"found by botocore: {found.source}"


class _Probes:
    def __init__(self, session: Session, inside: Session, folder: str) -> None:
        self._session, self._inside, self._folder = session, inside, folder
        self._data = bytes(range(256)) * 256
        self._probes: list[Probe] = []
        self._upload: Upload | None = None

    def run(self) -> list[Probe]:
        try:
            self._try("list", self._list)
            if self._try("write", self._write):
                self._try("conditional put", self._exclusive)
                self._try("read", self._read)
                self._try("range", self._range)
                self._try("list what was written", self._listed)
                self._try("write in parts", self._parts)
        finally:
            self._try("delete", self._delete)
            self._try("nothing is left", self._nothing)
        return self._probes

    def _try(self, name: str, probe: Callable[[], tuple[bool | None, str]]) -> bool:
        begin = time.perf_counter()
        try:
            ok, said = probe()
        except Exception as error:
            failure = self._inside.portable(error)
            ok, said = False, f"{type(failure).__name__}: {message_of(failure)}"
            said = redact(said, self._inside.secrets)
        self._probes.append(Probe(name, ok, said, time.perf_counter() - begin))
        return ok is not False

    def _call(self, call: Callable[[], Any], what: str) -> Any:
        return self._inside.call(call, what, Stats())

    def _list(self) -> tuple[bool, str]:
        return True, f"{len(commits(self._session))} checkpoints below it"

    def _write(self) -> tuple[bool, str]:
        store = self._inside.store
        self._call(lambda: store.put(_NAME, self._data, exclusive=True), "put")
        return True, f"{len(self._data)} bytes"

    def _exclusive(self) -> tuple[bool | None, str]:
        store = self._inside.store
        try:
            self._call(lambda: store.put(_NAME, b"other", exclusive=True), "put")
        except FileExistsError:
            return True, "a second one is refused"
        self._data = b"other"
        return None, (
            "the server ignores the condition: two jobs that save to one path at the same time "
            "are not told apart by it, so give each its own"
        )

    def _read(self) -> tuple[bool, str]:
        store = self._inside.store
        found = self._call(lambda: store.read(_NAME, 1 << 20), "read")
        size = self._call(lambda: store.size(_NAME), "size")
        return (found == self._data and size == len(found)), f"{len(found)} bytes, size says {size}"

    def _range(self) -> tuple[bool, str]:
        store = self._inside.store
        part = bytearray(3)
        self._call(lambda: store.read_into(_NAME, 1, [memoryview(part)]), "read")
        return part == self._data[1:4], "3 bytes from byte 1"

    def _listed(self) -> tuple[bool, str]:
        found = self._call(self._inside.store.sizes, "list")
        same = found == {_NAME: len(self._data)}
        return same, "at once" if same else f"expected {_NAME}, found {found}"

    def _parts(self) -> tuple[bool, str]:
        store = self._inside.store
        part = max(store.limits.min_part, 1 << 16)
        data = memoryview(bytes(part) + b"end")
        upload = self._call(lambda: store.create(_LARGE, part, 2), "create")
        self._upload = upload
        for at in range(0, len(data), part):
            piece = data[at : at + part]
            self._call(partial(upload.write, at, [piece]), "write a part")
        self._call(lambda: upload.complete(len(data)), "complete")
        self._upload = None
        size = self._call(lambda: store.size(_LARGE), "size")
        return size == len(data), f"{size} bytes in 2 parts of up to {part}"

    def _delete(self) -> tuple[bool, str]:
        if self._upload is not None:
            with contextlib.suppress(Exception):
                self._upload.abort()
        store = self._inside.store
        self._call(lambda: store.delete([_NAME, _LARGE]), "delete")
        if self._inside.is_local:
            with contextlib.suppress(FileNotFoundError):
                Path(local_path(self._inside.config.url)).rmdir()
        return True, "what was written"

    def _nothing(self) -> tuple[bool, str]:
        folders = self._call(self._session.store.folders, "list")
        left = self._folder in folders
        return not left, f"{self._folder} is still there" if left else "of what was tried"
