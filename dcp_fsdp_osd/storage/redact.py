"""Text that may be shown: without the secrets of URLs, options and servers' answers.

Three kinds of secrets are taken out, in every scheme: the values of options whose names say that
they are secret (as they are, quoted for a URL, and as ``repr`` writes them), what stands after a
name or a header that says so, and what has the shape of a secret by itself.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["display_url", "redact"]

_SECRET_KEY = re.compile(r"secret|token|passw|key|credential|sas|sig", re.IGNORECASE)


def redact(text: str, options: Mapping[str, Any]) -> str:
    """`text` without the secrets in `options` and without credentials in URLs."""

    def values(mapping: Mapping[Any, Any]) -> Iterable[str]:
        for key, value in mapping.items():
            if isinstance(value, Mapping):
                yield from values(value)
            elif isinstance(value, str) and len(value) > 3 and _SECRET_KEY.search(str(key)):
                yield value

    for value in sorted(values(options), key=len, reverse=True):
        text = text.replace(value, "***")
    text = re.sub(r"://[^/@\s]+@", "://***@", text)
    return re.sub(r"(?i)((?:signature|credential|token)=)[^&\s\"']+", r"\1***", text)


def display_url(path: str | os.PathLike[str]) -> str:
    """A path or URL as text that may be shown."""
    return redact(os.fspath(path), {})
