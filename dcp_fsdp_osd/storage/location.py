"""Where a checkpoint lies: a path of the local file system or a URL, and what is neither.

A name means the same on every backend: it is taken to the letter, so that ``#``, ``?``, ``%41``
and blanks are parts of names and no syntax.  What cannot mean the same everywhere is refused
everywhere: ``..``, ``.`` and empty names in URLs, control characters and backslashes.

Refused also is a path that was meant as something else, because a local folder of that name would
be made without a word: ``Path("s3://b/x")`` (which is ``s3:/b/x``), ``os.path.abspath`` of a URL,
``~/x`` and ``$HOME/x`` that nobody expanded, fsspec's chained URLs.  Whoever means a local folder
of such a name says so with ``file:///folder/s3:/b/x``.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from dcp_fsdp_osd.errors import StorageError
from dcp_fsdp_osd.storage.redact import display_url, redact, url_secrets

__all__ = ["is_local", "is_named", "join", "local_path", "parent", "resolve", "split_url"]

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://([^/]*)(.*)", re.DOTALL)
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*://")
_LIKE_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*:")
# Schemes that are met as `scheme:name`, where a colon in a name would otherwise be nothing special.
_SCHEMES = (
    "abfs", "abfss", "adl", "az", "azure", "blockcache", "cached", "file", "filecache", "ftp",
    "gcs", "gs", "hdfs", "hf", "http", "https", "local", "memory", "oss", "s3", "s3a", "sftp",
    "simplecache", "smb", "ssh", "wasb", "wasbs",
)  # fmt: skip
_CACHES = ("blockcache", "cached", "filecache", "simplecache")
_BUCKETS = ("abfs", "abfss", "adl", "az", "azure", "gcs", "gs", "s3", "s3a")
_LOCAL = ("file", "local")


def split_url(url: str) -> tuple[str, str, str]:
    """Scheme, authority (bucket or host) and the rest of a URL, to the letter; a path has no
    scheme and no authority.
    """
    parts = _URL.fullmatch(url)
    return ("", "", url) if parts is None else (parts[1], parts[2], parts[3].strip("/"))


def is_local(url: str) -> bool:
    """Whether it is a path or URL of the local (or a mounted) file system."""
    return split_url(url)[0] in ("", *_LOCAL)


def join(url: str, folder: str) -> str:
    """`folder` below a path or URL."""
    return f"{url.rstrip('/')}/{folder}" if "://" in url else str(Path(url) / folder)


def is_named(url: str, folder: str) -> bool:
    """Whether what others left below a path or URL has a name that :func:`resolve` takes."""
    try:
        resolve(join(url, folder))
    except StorageError:
        return False
    return bool(folder)


def local_path(url: str) -> str:
    """The path of a local path or URL."""
    return re.sub(r"^(file|local)://", "", url)


def parent(url: str) -> str:
    """The folder that a path or URL lies in; empty for a bucket."""
    if not split_url(url)[0]:
        return str(Path(url).parent)
    return url.rstrip("/").rpartition("/")[0] if split_url(url)[2] else ""


def resolve(path_or_url: str | os.PathLike[str]) -> str:
    """A path or URL as text that names one place; empty where `path_or_url` is.  Opens nothing.

    Raises:
        StorageError: it is likely to mean something else than it says, see above.
        TypeError: it is no path.
    """
    text = _text(path_or_url)
    shown = repr(display_url(text))
    if re.search(r"[\x00-\x1f\x7f\\]", text):
        raise StorageError(
            f"{shown} holds control characters or backslashes, which not every storage takes in a "
            "name, or keeps there; write it without them"
        )
    scheme, authority, _ = split_url(text)
    if "://" in (text[len(scheme) + 3 :] if scheme else text) or scheme in _CACHES:
        raise StorageError(_nested(text, shown))
    if not scheme:
        _check_path(text, shown)
    elif scheme not in _LOCAL:
        _check_url(scheme, authority, text, shown)
    return text


def _text(path_or_url: object) -> str:
    if isinstance(path_or_url, str):
        return str(path_or_url)
    shown = display_url(str(path_or_url))
    if not isinstance(path_or_url, os.PathLike):
        hint = f"; pass str() of it, {shown!r}" if "://" in shown else ""
        raise TypeError(
            f"expected a path or URL (str or os.PathLike), found {type(path_or_url).__name__}{hint}"
        )
    path = os.fspath(path_or_url)
    if not isinstance(path, str):
        raise TypeError(f"expected a path of str, found one of {type(path).__name__}: {path!r}")
    if "://" in shown and "://" not in path:
        # A cloud path whose __fspath__ is that of a local copy.
        raise StorageError(
            f"{type(path_or_url).__name__} {shown!r} would be taken for the local folder {path!r}; "
            "pass the URL as a str"
        )
    return path


def _check_path(path: str, shown: str) -> None:
    """Refuse what would make a local folder where none was meant."""
    literal = display_url(f"file://{Path(path).absolute()}")
    otherwise = f". If a local folder of that name is meant, write {literal!r}"
    names = path.split("/")
    scheme = next((name[:-1] for name in names if _LIKE_SCHEME.fullmatch(name)), None)
    first = names[0].partition(":")[0]
    if scheme is None and ":" in names[0] and first in _SCHEMES:
        scheme = first
    if scheme is None and path.startswith(tuple(f"{known}//" for known in _BUCKETS)):
        scheme = first
    if scheme is not None:
        rest = re.split(rf"(?:^|/){re.escape(scheme)}:?/*", path, maxsplit=1)[1]
        url = f"{scheme}://{rest}"
        message = (
            f"{shown} is a local path, but looks like the URL {display_url(url)!r}. pathlib and "
            f"os.path break URLs: pass a URL as a str, with two slashes{otherwise}"
        )
        raise StorageError(redact(message, url_secrets(url)))
    if "~" in names or names[0].startswith("~"):
        raise StorageError(
            f"{shown}: '~' is not expanded here; pass os.path.expanduser(path){otherwise}"
        )
    if re.match(r"\$\w|\$\{", names[0]):
        raise StorageError(
            f"{shown}: variables are not expanded here; pass os.path.expandvars(path){otherwise}"
        )


def _check_url(scheme: str, authority: str, url: str, shown: str) -> None:
    """Refuse URLs that mean different places to different clients."""
    if scheme in _BUCKETS and not authority:
        raise StorageError(f"{shown} names no bucket; expected {scheme}://bucket/folder")
    # Trailing slashes say nothing; one before them ends the authority.
    for name in url.rstrip("/").split("/")[3:]:
        if name in ("", ".", "..") or (
            scheme in ("http", "https") and name.lower().replace("%2e", ".") in (".", "..")
        ):
            raise StorageError(
                f"{shown} holds the name {name!r} between two slashes, which some clients take to "
                "the letter and others resolve; write the URL without it"
            )
    if scheme in ("http", "https") and re.search(r"[?#]", url):
        raise StorageError(
            f"{shown} has a query or a fragment, which would not reach the files below it; pass "
            "what it says in storage_options (of fsspec's HTTPFileSystem)"
        )


def _nested(url: str, shown: str) -> str:
    if "::" in url or split_url(url)[0] in _CACHES:
        return (
            f"{shown}: chained URLs and caches are not served, because a cache may hand out the "
            "metadata of an older save; pass the URL of the storage itself"
        )
    inner = url[max(found.start() for found in _SCHEME.finditer(url)) :]
    return f"{shown} is a URL with something before it; expected {display_url(inner)!r}"
