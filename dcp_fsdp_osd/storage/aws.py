"""What botocore, which comes with s3fs, does for obstore on S3.

obstore finds credentials in the environment and in instance roles alone: it is given those that the
AWS tools find (:func:`find_credentials`).  It lists no multipart uploads, and lists nothing where
one key has a form that it does not take (empty names, ``.``, ``..``, control characters):
:class:`PlainS3` does, with the same options.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timedelta, timezone
from typing import Any

from dcp_fsdp_osd.storage.location import split_url
from dcp_fsdp_osd.storage.options import for_botocore
from dcp_fsdp_osd.storage.store import StoreConfig

__all__ = ["Credentials", "PlainS3", "find_credentials", "list_uploads"]

# botocore renews credentials that end within this time; obstore asks anew five minutes before.
_LIFE = timedelta(minutes=10)


class Credentials:
    """A ``credential_provider`` of obstore's that asks botocore, which renews what expires.

    Attributes:
        source: how botocore found them: ``"shared-credentials-file"``, ``"iam-role"``, ``"sso"``...
        settings: region and endpoint of the profile, under obstore's names, where the environment
            names no others.
    """

    def __init__(self, found: Any, settings: Mapping[str, str]) -> None:
        self._found = found
        self.source = str(found.method)
        self.settings = dict(settings)

    def __call__(self) -> dict[str, Any]:
        now = self._found.get_frozen_credentials()
        return {
            "access_key_id": now.access_key,
            "secret_access_key": now.secret_key,
            "token": now.token,
            "expires_at": datetime.now(timezone.utc) + _LIFE,
        }

    def added_to(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Options for obstore with these credentials, and settings that the options leave open."""
        given = {str(name).lower().removeprefix("aws_") for name in options}
        named = {
            "region": given & {"region", "default_region"},
            "endpoint": given & {"endpoint", "endpoint_url", "endpoint_url_s3"},
        }
        more = {name: value for name, value in self.settings.items() if not named[name]}
        return {**options, **more, "credential_provider": self}


@functools.cache
def _descriptions() -> Any:
    """botocore's reader of the files that describe the services' requests, which come with it and
    never change: reading S3's takes 150 ms, and each save makes a client."""
    from botocore.loaders import create_loader

    return create_loader()


def _session() -> Any:
    from botocore.session import Session

    session = Session()
    if not session.get_config_variable("data_path"):  # else they are the user's
        session.register_component("data_loader", _descriptions())
    return session


def find_credentials(environ: Mapping[str, str] = os.environ) -> Credentials | None:
    """The credentials that the AWS tools (and s3fs) would use; None if there are none.

    Environment, profiles, SSO, web identities, roles of containers and instances.  May ask the
    network (the instance's metadata) where nothing nearer is found.

    Raises:
        botocore.exceptions.BotoCoreError: the configuration names what is not there.
    """
    session = _session()
    found = session.get_credentials()
    if found is None:
        return None
    settings: dict[str, str] = {}
    region = session.get_config_variable("region")
    if region and not {"AWS_REGION", "AWS_DEFAULT_REGION"} & environ.keys():
        settings["region"] = str(region)
    endpoint = _endpoint(session)
    named = {"AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"} & environ.keys()
    if endpoint and not named:
        settings["endpoint"] = endpoint
    return Credentials(found, settings)


def _endpoint(session: Any) -> str | None:
    """What the profile says of S3's endpoint."""
    if str(session.get_config_variable("ignore_configured_endpoint_urls")).lower() == "true":
        return None
    profile = session.get_scoped_config()
    services = session.full_config.get("services", {}).get(profile.get("services"), {})
    of_s3 = services.get("s3")
    found = of_s3.get("endpoint_url") if isinstance(of_s3, Mapping) else None
    found = found or profile.get("endpoint_url")
    return None if found is None else str(found)


def list_uploads(call: Callable[..., Mapping[str, Any]], prefix: str) -> list[tuple[str, str]]:
    """As :meth:`Store.uploads`, of the keys below ``prefix``.

    ``call`` sends a request to the bucket, by botocore's name and arguments.
    """
    found: list[tuple[str, str]] = []
    after: dict[str, str] = {}
    while True:
        page = call("list_multipart_uploads", Prefix=prefix, **after)
        for each in page.get("Uploads", ()):
            name = str(each["Key"]).removeprefix(prefix)
            if "/" not in name:
                found.append((name, str(each["UploadId"])))
        last = {
            "KeyMarker": str(page.get("NextKeyMarker", "")),
            "UploadIdMarker": str(page.get("NextUploadIdMarker", "")),
        }
        if not page.get("IsTruncated") or last == after:
            return found
        after = last


class PlainS3:
    """A few requests to the bucket of an S3 URL; blocks.  Thread-safe.

    Errors: ``FileNotFoundError`` for a missing bucket or upload, ``ConnectionError`` for what may
    pass, ``PermissionError`` for denied access; else botocore's own.

    Raises:
        ValueError: the options have no equivalent in botocore.
    """

    def __init__(self, config: StoreConfig) -> None:
        from botocore import UNSIGNED
        from botocore.config import Config

        seconds = max(config.stall_seconds / 3, 0.1)
        scheme, self._bucket, prefix = split_url(config.url)
        if scheme not in ("s3", "s3a"):
            raise ValueError(scheme)
        self._prefix = f"{prefix}/" if prefix else ""
        given = for_botocore(config.options)
        anonymous = given.pop("anon", False)
        settings = Config(
            connect_timeout=min(seconds, 10),
            read_timeout=seconds,
            retries={"total_max_attempts": 1},
            **({"signature_version": UNSIGNED} if anonymous else {}),
        )
        self._client: Any = _session().create_client("s3", config=settings, **given)

    def pages(self) -> Iterator[Mapping[str, Any]]:
        """Answers of ListObjectsV2 for what is directly below the prefix."""
        token: dict[str, str] = {}
        while True:
            page = self._call("list_objects_v2", Prefix=self._prefix, Delimiter="/", **token)
            yield page
            if not page.get("IsTruncated"):
                return
            token = {"ContinuationToken": page["NextContinuationToken"]}

    def uploads(self) -> list[tuple[str, str]]:
        """As :meth:`Store.uploads`."""
        return list_uploads(self._call, self._prefix)

    def abort_upload(self, name: str, upload: str) -> None:
        """As :meth:`Store.abort_upload`."""
        key = f"{self._prefix}{name}"
        try:
            self._call("abort_multipart_upload", Key=key, UploadId=upload)
        except FileNotFoundError:
            return

    def _call(self, method: str, **kwargs: Any) -> Mapping[str, Any]:
        from botocore.exceptions import ClientError, HTTPClientError

        try:
            answer: Mapping[str, Any] = getattr(self._client, method)(Bucket=self._bucket, **kwargs)
            return answer
        except HTTPClientError as error:
            raise ConnectionError(f"{type(error).__name__}: {error}") from error
        except ClientError as error:
            status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
            kind: type[OSError] | None = {403: PermissionError, 404: FileNotFoundError}.get(status)
            if status in (408, 409, 429) or status >= 500:
                kind = ConnectionError
            if kind is None:
                raise
            raise kind(str(error)) from error
