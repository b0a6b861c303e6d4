"""Storage options: one small set that works with either S3 client, each client's own, and mix-ups.

============== ================================== ==================================
ours           s3fs (``backend="fsspec"``)        obstore
============== ================================== ==================================
endpoint_url   endpoint_url                       endpoint
region         client_kwargs["region_name"]       region
key            key                                access_key_id
secret         secret                             secret_access_key
token          token                              session_token
anon           anon                               skip_signature
allow_http     (the endpoint's scheme decides)    client_options["allow_http"]
============== ================================== ==================================

An ``http://`` endpoint is consent to plain HTTP, unless ``allow_http=False``.  Everything else is
the chosen client's own.  A name that is not is an error that names the right one, because both
clients take some wrong names without a word.  Pure, but for the environment's ``AWS_`` variables.
"""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Iterable, Mapping
from typing import Any

from dcp_fsdp_osd.errors import StorageError

__all__ = [
    "COMMON",
    "did_you_mean",
    "for_botocore",
    "for_obstore",
    "for_s3fs",
    "means_fsspec",
    "names_credentials",
]

COMMON = ("endpoint_url", "region", "key", "secret", "token", "anon", "allow_http")

_OBSTORE = {
    "endpoint_url": "endpoint",
    "region": "region",
    "key": "access_key_id",
    "secret": "secret_access_key",
    "token": "session_token",
    "anon": "skip_signature",
}
# What other clients (boto3, s3fs, obstore, pyarrow) call what we have a name for.
_ELSEWHERE = {
    "access_key": "key", "access_key_id": "key", "aws_access_key_id": "key", "username": "key",
    "secret_key": "secret", "secret_access_key": "secret", "aws_secret_access_key": "secret",
    "password": "secret", "session_token": "token", "aws_session_token": "token",
    "aws_token": "token", "endpoint": "endpoint_url", "aws_endpoint": "endpoint_url",
    "aws_endpoint_url": "endpoint_url", "endpoint_override": "endpoint_url",
    "url": "endpoint_url", "region_name": "region", "aws_region": "region",
    "default_region": "region", "aws_default_region": "region", "skip_signature": "anon",
    "aws_skip_signature": "anon", "anonymous": "anon", "use_ssl": "allow_http",
    "aws_allow_http": "allow_http",
}  # fmt: skip
# Options of s3fs, gcsfs and adlfs that are not ours too: whoever gives one means fsspec.
_FSSPEC = {
    "account_key", "account_name", "cache_regions", "client_kwargs", "config_kwargs",
    "connection_string", "default_block_size", "password", "profile", "project", "requester_pays",
    "s3_additional_kwargs", "session", "use_ssl", "username",
}  # fmt: skip
# Of obstore's ClientConfig; they are also read from AWS_ALLOW_HTTP and so on.
_CLIENT = (
    "allow_http", "allow_invalid_certificates", "connect_timeout", "default_content_type",
    "http1_only", "http2_keep_alive_interval", "http2_keep_alive_timeout",
    "http2_keep_alive_while_idle", "http2_only", "pool_idle_timeout", "pool_max_idle_per_host",
    "proxy_ca_certificate", "proxy_excludes", "proxy_url", "randomize_addresses", "read_timeout",
    "timeout", "user_agent",
)  # fmt: skip
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_ENDPOINT = ("endpoint", "endpoint_url", "endpoint_url_s3")
_S3 = ("s3", "s3a")
_PREFIXES = {"gs": "GOOGLE_", "s3": "AWS_", "s3a": "AWS_"}  # of the environment; else Azure's


def means_fsspec(options: Mapping[str, Any], scheme: str) -> bool:
    """Whether options have a name of fsspec's clients, which obstore has none for."""
    # For other schemes than S3 these are names of gcsfs and adlfs.
    theirs = _FSSPEC if scheme in _S3 else _FSSPEC | set(COMMON) - {"region", "allow_http"}
    return not theirs.isdisjoint(map(str, options))


def names_credentials(options: Mapping[str, Any]) -> bool:
    """Whether options say how requests to S3 are signed, or that they are not."""
    named = {str(name).lower().removeprefix("aws_") for name, v in options.items() if v is not None}
    return not named.isdisjoint(
        ("access_key_id", "anon", "credential_provider", "key", "skip_signature")
    )


def for_obstore(
    options: Mapping[str, Any], scheme: str, environ: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """Keyword arguments of ``obstore.store.from_url``, less our time limits and retries.

    Raises:
        StorageError: an option is not obstore's, twice there, or forbids what the endpoint needs.
    """
    found = {str(key): value for key, value in options.items() if value is not None}
    client: dict[str, Any] = dict(found.pop("client_options", None) or {})
    for name in list(found):
        plain = name.lower().removeprefix("aws_")
        if plain == "allow_http":
            client[plain] = found.pop(name)
        elif plain in _CLIENT:  # obstore panics
            raise StorageError(f"obstore takes the option {plain!r} within 'client_options'")
    # obstore reads these from the environment too, but forgets them where a client option is given.
    prefix = _PREFIXES.get(scheme, "AZURE_")
    for name in _CLIENT:
        if f"{prefix}{name.upper()}" in environ:
            client.setdefault(name, environ[f"{prefix}{name.upper()}"])
    if scheme in _S3:
        found = _s3_names(found)
        _allow_http(found, client, environ)
    if "allow_http" in client:
        client["allow_http"] = not _is_no(client["allow_http"])
    return {**found, "client_options": client}


def _s3_names(found: dict[str, Any]) -> dict[str, Any]:
    """Our names as obstore's."""
    for name in found:
        if name in ("client_kwargs", "config_kwargs", "profile") or (
            name in _ELSEWHERE and name in _FSSPEC
        ):
            raise _wrong(name, "obstore", ())
    for ours, theirs in _OBSTORE.items():
        if ours != theirs and ours in found and theirs in found:
            raise _twice(ours, theirs)
    return {_OBSTORE.get(name, name): value for name, value in found.items()}


def _allow_http(
    found: Mapping[str, Any], client: dict[str, Any], environ: Mapping[str, str]
) -> None:
    """An endpoint that says ``http://`` is consent, where nothing else is said."""
    named = [v for name, v in found.items() if name.lower().removeprefix("aws_") in _ENDPOINT]
    named += [environ[name] for name in _ENDPOINTS if environ.get(name)]
    plain = bool(named) and str(named[0]).lower().startswith("http://")
    if plain and _is_no(client.setdefault("allow_http", True)):
        raise _forbidden(named[0])


def _is_no(value: object) -> bool:
    return str(value).lower() in ("false", "0", "no", "off", "none", "")


def for_s3fs(options: Mapping[str, Any], known: type) -> dict[str, Any]:
    """Keyword arguments of ``s3fs.S3FileSystem``, which is `known`.

    Raises:
        StorageError: as above.
    """
    found = {str(key): value for key, value in options.items()}
    allow_http = found.pop("allow_http", None)
    client = dict(found.get("client_kwargs") or {})
    if "region" in found:
        if "region_name" in client:
            raise _twice("region", "client_kwargs['region_name']")
        client["region_name"] = found.pop("region")
    if client:
        found["client_kwargs"] = client
    names = {
        name
        for each in known.__mro__
        for name in inspect.signature(each.__init__).parameters  # type: ignore[misc]
    }
    names |= {"asynchronous", "batch_size", "loop", "skip_instance_cache", "listings_expiry_time"}
    names |= {"use_listings_cache", "max_paths", "protocol"}
    names |= {"profile", "session_vars", "event_hooks", "include_builtin_handlers"}
    for name in found:
        if name not in names or name in ("self", "args", "kwargs", "storage_options"):
            raise _wrong(name, "s3fs", names)
    endpoint = found.get("endpoint_url") or client.get("endpoint_url") or ""
    if allow_http is not None and not allow_http and str(endpoint).lower().startswith("http://"):
        raise _forbidden(endpoint)
    return found


def for_botocore(
    options: Mapping[str, Any], environ: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """Keyword arguments of ``botocore.session.Session.create_client``, and `anon`, from options
    that were made for obstore.  What botocore has no equivalent for is left out.

    Raises:
        ValueError: no credentials can be had from the `credential_provider`.
    """
    found: dict[str, Any] = {}
    for name, value in options.items():
        plain = str(name).lower().removeprefix("aws_")
        ours = "endpoint_url" if plain in _ENDPOINT else _ELSEWHERE.get(plain, plain)
        if ours in COMMON and value is not None:
            found[ours] = value
    provider = options.get("credential_provider")
    if provider is not None:
        now = provider()
        if not isinstance(now, Mapping):  # an asynchronous one
            getattr(now, "close", lambda: None)()
            raise ValueError("credential_provider")
        found.update(key=now["access_key_id"], secret=now["secret_access_key"])
        found["token"] = now.get("token")
    if environ.get("AWS_ENDPOINT"):
        found.setdefault("endpoint_url", environ["AWS_ENDPOINT"])
    if environ.get("AWS_REGION"):
        found.setdefault("region", environ["AWS_REGION"])
    names = {
        "endpoint_url": "endpoint_url",
        "region": "region_name",
        "key": "aws_access_key_id",
        "secret": "aws_secret_access_key",
        "token": "aws_session_token",
    }
    made = {theirs: found[ours] for ours, theirs in names.items() if ours in found}
    return {**made, "anon": not _is_no(found.get("anon", False))}


def did_you_mean(name: str, names: Iterable[str] = ()) -> str:
    """What to say of an option that a client does not have."""
    lower = name.lower()
    if lower in _ELSEWHERE:
        return f"use {_ELSEWHERE[lower]!r}"
    if lower == "client_kwargs":
        return "use 'endpoint_url' and 'region' for what is in it"
    if lower == "config_kwargs":
        return "use 'client_options' and 'retry_config' (see obstore.store.from_url)"
    if lower == "profile":
        return "obstore takes the profile from AWS_PROFILE: set that, or use backend='fsspec'"
    close = difflib.get_close_matches(lower, {*COMMON, *_ELSEWHERE, *names}, 1)
    if close:
        return f"did you mean {_ELSEWHERE.get(close[0], close[0])!r}?"
    return f"expected {', '.join(COMMON)}, or its own options"


def _wrong(name: str, client: str, names: Iterable[str]) -> StorageError:
    return StorageError(f"{client} has no option {name!r}: {did_you_mean(name, names)}")


def _twice(ours: str, theirs: str) -> StorageError:
    return StorageError(f"storage_options say the same twice, as {ours!r} and as {theirs!r}")


def _forbidden(endpoint: object) -> StorageError:
    from dcp_fsdp_osd.storage.redact import display_url

    return StorageError(
        f"the endpoint {display_url(str(endpoint))!r} is plain HTTP, and allow_http is False"
    )
