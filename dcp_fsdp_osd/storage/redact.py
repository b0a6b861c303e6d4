"""Text and errors that may be shown: without the secrets of URLs, options and servers' answers.

Secrets are known by three signs, in every scheme: they are the values of options (or parts of the
URL) whose names say that they are secret; they stand where a URL, a query, a header, a dict or an
XML answer has one; or they have the shape of one by themselves.  What is taken out in doubt costs a
word of a message, so doubts are decided that way.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote, quote_plus, unquote

from dcp_fsdp_osd.errors import FlatOptimError, StorageError, message_of

__all__ = ["cleaned", "display_url", "redact", "url_secrets"]

_OPTION = re.compile(
    r"secret|token|pass|pwd|key|credential|sas|sig|auth|connection_string|cookie", re.IGNORECASE
)
_NAME = (
    r"(?:[\w.\-]*(?:secret|token|passw|passphrase|pwd|credential|signature|"
    r"(?:api|access|account|private|shared|encryption)[-_]?key|authorization|connection[-_]?string)"
    r"[\w\-]*|x-(?:amz|goog|ms)-[\w\-]+|sig|sas)"
)
_PATTERNS = [
    # name=value, as in queries, connection strings and reprs
    (rf"(?<![\w.\-])({_NAME}=)(?:'[^']*'|\"[^\"]*\"|[^\s&\"',;)\]}}<>]+)", r"\1***"),
    (r"([?&;](?:key|auth|pass|pw|code)=)[^\s&\"';<>]+", r"\1***"),
    # 'name': 'value', as in dicts and JSON
    (
        rf"(([\"'])(?:{_NAME}|key|auth|pass|pw)\2\s*:\s*b?)(?:'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")",
        r"\1'***'",
    ),
    # Headers
    (
        r"(\b(?:(?:proxy-)?authorization|(?:set-)?cookie|x-api-key|x-(?:amz|goog|ms)-[\w\-]+)"
        r"\s*:\s*)[^\r\n\"']+",
        r"\1***",
    ),
    (r"\b(bearer|basic|aws4-hmac-sha256|sharedkey)\s+[\w+/=.:,\-]{6,}", r"\1 ***"),
    # What S3 quotes of a request that it did not accept
    (
        r"<((?:\w*Token|AWSAccessKeyId|StringToSign|SignatureProvided|CanonicalRequest)[\w\-]*)>"
        r"[^<]*",
        r"<\1>***",
    ),
    # By shape: ids of AWS keys, JWTs, tokens of GitHub, Hugging Face, Google, Slack; private keys
    (r"(?-i:\b(?:AKIA|ASIA)[A-Z0-9]{12,})", "***"),
    (r"(?-i:\beyJ[\w\-]{8,}\.[\w\-]+(?:\.[\w\-]*)?)", "***"),
    (
        r"(?-i:\b(?:gh[pousr]_\w{20,}|github_pat_\w{20,}|hf_\w{20,}|ya29\.[\w\-]{10,}"
        r"|AIza[\w\-]{20,}|xox[a-z]-[\w\-]{10,}))",
        "***",
    ),
    (r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", "***"),
]
_COMPILED = [(re.compile(pattern, re.I | re.S), by) for pattern, by in _PATTERNS]
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*://)([^\s\"'<>]+)")
_NO_USERS = ("abfs://", "abfss://", "wasb://", "wasbs://")  # what is before the @ is a container


def redact(text: str, options: Mapping[str, Any]) -> str:
    """`text` without the secrets in `options`, and without what looks like one."""
    found = {value for value in _values(options) if len(value) > 3}
    forms = {form for value in found for form in _spellings(value)}
    for form in sorted(forms, key=len, reverse=True):
        text = text.replace(form, "***")
    text = _URL.sub(lambda url: url[1] + _without_user(url[1], url[2]), text)
    for pattern, by in _COMPILED:
        text = pattern.sub(by, text)
    return text


def display_url(path: str | os.PathLike[str]) -> str:
    """A path or URL as text that may be shown."""
    text = os.fspath(path)
    url = re.fullmatch(r"([A-Za-z][A-Za-z0-9+.\-]*://)(.*)", text, re.DOTALL)
    return redact(text if url is None else url[1] + _without_user(url[1], url[2]), {})


def url_secrets(url: str) -> dict[str, str]:
    """The secrets that a URL holds, like options: an error may quote them without the URL."""
    scheme, mark, rest = url.partition("://")
    user = _user(f"{scheme}://", rest) if mark else ""
    name, colon, password = user.partition(":")
    found = {"password": password if colon else name}
    for key, value in re.findall(rf"(?i)[?&;]({_NAME}|key|auth|pass|pw|code)=([^&;#]*)", rest):
        found[f"token {key}"] = value
    return {key: value for key, value in found.items() if value}


def cleaned(error: BaseException, options: Mapping[str, Any]) -> BaseException:
    """`error` itself where it and what it was raised from show no secret; else a likeness of it.

    A likeness has the texts without the secrets, for causes too, and the tracebacks.  It is of the
    same class where that is one of ours or of Python's, else a StorageError that names the class.
    It is to be raised outside of the ``except`` block, so that `error` is not its context.
    """
    if not any(_shows(link, options) for link in _links(error)):
        return error
    likeness: BaseException | None = None
    for link in reversed(list(_told(error))):
        text = redact(message_of(link), options)
        made = _like(link, text).with_traceback(link.__traceback__)
        made.__cause__, likeness = likeness, made
    assert likeness is not None
    return likeness


def _values(options: object, secret: bool = False) -> Iterator[str]:
    """Texts in `options` that stand under a name which says that they are secret."""
    if isinstance(options, Mapping):
        for key, value in options.items():
            yield from _values(value, secret or bool(_OPTION.search(str(key))))
    elif isinstance(options, list | tuple | set | frozenset):
        for value in options:
            yield from _values(value, secret)
    elif secret and isinstance(options, str):
        yield options
    elif secret and isinstance(options, bytes | bytearray):
        yield bytes(options).decode("utf-8", "replace")


def _spellings(value: str) -> Iterable[str]:
    """A value as it may stand in an error: as it is, quoted, unquoted, escaped."""
    yield from (value, quote(value), quote(value, safe=""), quote_plus(value), unquote(value))
    yield repr(value)[1:-1]


def _user(scheme: str, rest: str) -> str:
    """The user and password of a URL, whose password may hold what should have been quoted."""
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    if "@" in rest and ":" in authority and not re.fullmatch(r"[^:@]*:\d{1,5}", authority):
        return rest.rpartition("@")[0]
    user = authority.rpartition("@")[0]
    return "" if scheme.lower() in _NO_USERS else user


def _without_user(scheme: str, rest: str) -> str:
    user = _user(scheme, rest)
    return f"***{rest[len(user) :]}" if user else rest


def _told(error: BaseException) -> Iterator[BaseException]:
    """An error and its causes, as a traceback tells them."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _links(error: BaseException) -> Iterator[BaseException]:
    """Everything that hangs on an error, told or not."""
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        link = todo.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            yield link
            todo += [link.__cause__, link.__context__]


def _shows(error: BaseException, options: Mapping[str, Any]) -> bool:
    try:
        texts = [message_of(error), repr(error), *getattr(error, "__notes__", ())]
    except Exception:
        texts = [message_of(error)]
    return any(redact(text, options) != text for text in texts)


def _like(error: BaseException, text: str) -> BaseException:
    kind = type(error)
    if isinstance(error, FlatOptimError) or kind.__module__ == "builtins":
        try:
            return kind(text)
        except Exception:  # a class that takes more than a text
            pass
    return StorageError(f"{kind.__module__}.{kind.__qualname__}: {text}")
