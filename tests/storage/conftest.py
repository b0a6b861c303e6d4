"""One place for each kind of store, for the suites that run over all of them."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
import fsspec
import hypothesis
import pytest
import torch

from dcp_fsdp_osd.storage import StreamingReader, StreamingWriter
from dcp_fsdp_osd.storage.opening import open_store
from dcp_fsdp_osd.storage.store import Store, StoreConfig
from tests.servers import S3Endpoint, SeaweedS3, moto_server, seaweed_server

# A busy machine may take a second for what takes a millisecond.
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")

KINDS = ("local", "file", "memory", "s3fs", "obstore")


@dataclass(frozen=True)
class Place:
    """An empty folder on one kind of store, and what opens it."""

    kind: str
    url: str
    backend: Any
    options: Mapping[str, Any] = field(default_factory=dict)
    endpoint: S3Endpoint | None = None

    def below(self, name: str) -> Place:
        return Place(self.kind, f"{self.url}/{name}", self.backend, self.options, self.endpoint)

    @property
    def arguments(self) -> dict[str, Any]:
        return {"backend": self.backend, "storage_options": self.options}

    def writer(self, **arguments: Any) -> StreamingWriter:
        return StreamingWriter(self.url, **self.arguments, **arguments)

    def reader(self, **arguments: Any) -> StreamingReader:
        return StreamingReader(self.url, **self.arguments, **arguments)

    def store(self) -> Store:
        return open_store(StoreConfig(self.url, self.backend, self.options))

    def uploads(self) -> list[str]:
        """Keys of multipart uploads that were neither completed nor aborted."""
        if self.endpoint is None:
            return []
        client = boto3.client("s3", **self.endpoint.boto3_options)
        found = client.list_multipart_uploads(Bucket=self.endpoint.bucket).get("Uploads", [])
        return [upload["Key"] for upload in found]


@pytest.fixture(scope="package", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Spinning OpenMP threads on a busy machine take more time than the tests' arithmetic."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="package")
def weed() -> Iterator[SeaweedS3]:
    """One SeaweedFS for all tests: it takes seconds to start.  Who kills it starts it again."""
    with seaweed_server() as server:
        yield server


@pytest.fixture(scope="session")
def moto() -> Iterator[S3Endpoint]:
    with moto_server() as endpoint:
        yield endpoint


@pytest.fixture
def make_place(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[[str], Place]:
    count = itertools.count()

    def make(kind: str) -> Place:
        name = f"{uuid.uuid4().hex}/{next(count)}"
        if kind == "local":
            return Place(kind, str(tmp_path / name), "auto")
        if kind == "file":
            return Place(kind, f"file://{tmp_path}/{name}", "fsspec")
        if kind == "memory":
            request.addfinalizer(fsspec.filesystem("memory").store.clear)
            return Place(kind, f"memory://{name}", "auto")
        endpoint: S3Endpoint = request.getfixturevalue("moto")
        if kind == "s3fs":
            options = endpoint.storage_options
            return Place(kind, endpoint.url(name), "fsspec", options, endpoint)
        return Place(kind, endpoint.url(name), "obstore", endpoint.obstore_options, endpoint)

    return make


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, make_place: Callable[[str], Place]) -> Place:
    return make_place(request.param)
