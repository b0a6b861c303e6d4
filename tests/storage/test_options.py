"""One set of options for both S3 clients; wrong names in one line; what all ranks can compute."""

from __future__ import annotations

import logging
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from dcp_fsdp_osd import FlatOptimLoadPlanner, StreamingReader, StreamingWriter, latest
from dcp_fsdp_osd.errors import StorageError
from dcp_fsdp_osd.storage.aws import find_credentials
from dcp_fsdp_osd.storage.local_store import LocalStore
from dcp_fsdp_osd.storage.opening import open_store
from dcp_fsdp_osd.storage.options import for_obstore
from dcp_fsdp_osd.storage.store import StoreConfig
from tests.ranks import run_ranks
from tests.servers import S3Endpoint
from tests.storage.conftest import Place

BACKENDS = ("fsspec", "obstore", "auto")
STATE = {"t": torch.arange(100.0)}


def common(endpoint: S3Endpoint) -> dict[str, Any]:
    return {
        "endpoint_url": endpoint.endpoint_url,
        "region": endpoint.region,
        "key": endpoint.access_key,
        "secret": endpoint.secret_key,
    }


@pytest.mark.each_value
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("more", [{}, {"allow_http": True}, {"token": None}, {"anon": False}])
def test_one_set_of_options(moto: S3Endpoint, backend: Any, more: dict[str, Any]) -> None:
    """A plain HTTP server, as MinIO is by default."""
    url = moto.url(f"common/{backend}/with-{'-'.join(more)}")
    given: Any = {"backend": backend, "storage_options": {**common(moto), **more}}
    dcp.save(dict(STATE), storage_writer=StreamingWriter(f"{url}/step-1", **given))
    found = {"t": torch.zeros(100)}
    dcp.load(found, storage_reader=StreamingReader(f"{url}/step-1", **given))
    assert torch.equal(found["t"], STATE["t"])
    assert latest(url, **given) == f"{url}/step-1"


def test_options_of_the_environment(moto: S3Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", moto.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", moto.secret_key)
    monkeypatch.setenv("AWS_REGION", moto.region)
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto.endpoint_url)
    for allow in (None, "true"):
        if allow:
            monkeypatch.setenv("AWS_ALLOW_HTTP", allow)
        assert open_store(StoreConfig(moto.url("env"), "obstore")).sizes() == {}
    environ = {"AWS_ALLOW_HTTP": "true", "AWS_PROXY_URL": "http://proxy", "AWS_TIMEOUT": "7s"}
    client = for_obstore({}, "s3", environ)["client_options"]
    assert client == {"allow_http": True, "proxy_url": "http://proxy", "timeout": "7s"}
    assert for_obstore({"client_options": {"timeout": "1s"}}, "s3", environ)["client_options"] == {
        **client, "timeout": "1s",
    }  # fmt: skip


@pytest.fixture
def no_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment in which nobody finds credentials; the folder that configures it."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    return tmp_path


def chose(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if "'auto' chose" in text]


def test_auto_finds_the_credentials_of_a_profile(
    moto: S3Endpoint,
    no_credentials: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Those that s3fs would use, with the profile's region and endpoint; the backend is told."""
    caplog.set_level(logging.INFO, "dcp_fsdp_osd")
    url = moto.url("of-a-profile/step-1")
    assert StreamingWriter(url).backend == "fsspec"
    assert chose(caplog) == [f"{url}: backend='auto' chose 'fsspec': no credentials were found"]
    (no_credentials / "credentials").write_text(
        f"[team]\naws_access_key_id = {moto.access_key}\naws_secret_access_key = xyz\n"
    )
    (no_credentials / "config").write_text(
        f"[profile team]\nregion = eu-west-3\nendpoint_url = {moto.endpoint_url}\n"
    )
    monkeypatch.setenv("AWS_PROFILE", "team")
    caplog.clear()
    writer, reader = StreamingWriter(url), StreamingReader(url)
    dcp.save(dict(STATE), storage_writer=writer)
    found = {"t": torch.zeros(100)}
    dcp.load(found, storage_reader=reader)
    assert torch.equal(found["t"], STATE["t"])
    assert latest(moto.url("of-a-profile")) == url
    assert writer.backend == reader.backend == "obstore"
    reason = "it is installed, with credentials of 'shared-credentials-file'"
    assert chose(caplog)[:2] == [f"{url}: backend='auto' chose 'obstore': {reason}"] * 2
    assert "xyz" not in caplog.text
    given = find_credentials()
    assert given is not None
    assert given.settings == {"region": "eu-west-3", "endpoint": moto.endpoint_url}
    now = given()
    assert (now["access_key_id"], now["secret_access_key"]) == (moto.access_key, "xyz")
    # What the caller or the environment says goes before the profile.
    assert given.added_to({"aws_region": "a", "endpoint_url": "b"}).keys() == {
        "aws_region", "endpoint_url", "credential_provider",
    }  # fmt: skip
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT", "http://other")
    given = find_credentials()
    assert given is not None and given.settings == {}
    monkeypatch.setenv("AWS_PROFILE", "no-such-team")
    assert StreamingWriter(url).backend == "fsspec"
    assert "looking for credentials failed (ProfileNotFound)" in chose(caplog)[-1]


def test_what_serves_is_told(tmp_path: Path, moto: S3Endpoint, no_credentials: Path) -> None:
    for use in (StreamingWriter, StreamingReader):
        made: Any = use
        assert made().backend == "auto"
        assert made(tmp_path).backend == made(f"file://{tmp_path}").backend == "local"
        assert made(f"file://{tmp_path}", backend="fsspec").backend == "fsspec"
        assert made(tmp_path, backend=LocalStore).backend == "LocalStore"
        assert made("memory://x").backend == "fsspec"
        assert made(moto.url("x"), storage_options=common(moto)).backend == "obstore"
        assert made(moto.url("x"), storage_options={"anon": True}).backend == "obstore"
        assert made(moto.url("x"), storage_options={"profile": "a"}).backend == "fsspec"
        moved = made(moto.url("x"), storage_options=common(moto))
        assert moved.backend == "obstore"
        moved.reset(str(tmp_path))
        assert moved.backend == "local"


@pytest.mark.parametrize(
    ("backend", "options", "said"),
    [
        ("fsspec", {"access_key_id": "a"}, "'access_key_id': use 'key'"),
        ("fsspec", {"aws_secret_access_key": "a"}, "use 'secret'"),
        ("fsspec", {"endpoint": "http://x"}, "use 'endpoint_url'"),
        ("fsspec", {"session_token": "a"}, "use 'token'"),
        ("fsspec", {"skip_signature": True}, "use 'anon'"),
        ("fsspec", {"endpont_url": "http://x"}, "did you mean 'endpoint_url'"),
        ("fsspec", {"client_options": {}}, "no option 'client_options'"),
        ("fsspec", {"allow_http": False, "endpoint_url": "http://x"}, "plain HTTP"),
        ("fsspec", {"region": "a", "client_kwargs": {"region_name": "b"}}, "twice"),
        ("obstore", {"client_kwargs": {"endpoint_url": "x"}}, "use 'endpoint_url' and 'region'"),
        ("obstore", {"config_kwargs": {}}, "use 'client_options'"),
        ("obstore", {"profile": "a"}, "backend='fsspec'"),
        ("obstore", {"username": "a"}, "use 'key'"),
        ("obstore", {"use_ssl": False}, "use 'allow_http'"),
        ("obstore", {"endpont": "http://x"}, "did you mean 'endpoint_url'"),
        ("obstore", {"timeout": "3s"}, "within 'client_options'"),
        ("obstore", {"aws_timeout": "3s"}, "within 'client_options'"),
        ("obstore", {"key": "a", "access_key_id": "b"}, "twice"),
        ("obstore", {"allow_http": False, "endpoint_url": "http://x"}, "plain HTTP"),
        ("obstore", {"client_options": {"allow_htp": True}}, "did you mean 'allow_http'"),
    ],
)
def test_a_wrong_name(backend: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(StorageError) as error:
        open_store(StoreConfig("s3://bucket/x", backend, options))
    assert said in str(error.value) and "\n" not in str(error.value)


def _without_the_package(rank: int, world: int, path: str) -> None:
    """Rank 1 has no crc32c; it can save all the same, and load."""
    if rank == 1:
        sys.modules["crc32c"] = None  # type: ignore[assignment]
    try:
        state = {"t": torch.full((10,), float(rank)), f"rank{rank}": torch.ones(300)}
        dcp.save(state, storage_writer=StreamingWriter(path))
        found = {f"rank{rank}": torch.zeros(300), f"rank{1 - rank}": torch.zeros(300)}
        dcp.load(found, storage_reader=StreamingReader(path))
        assert all(torch.equal(value, torch.ones(300)) for value in found.values())
    finally:
        if rank == 1:
            del sys.modules["crc32c"]


def test_a_rank_without_the_checksum_package(tmp_path: Path) -> None:
    run_ranks(_without_the_package, 2, str(tmp_path / "c"))


def said_by(load: Any) -> str:
    """The error, which has to be one StorageError of a few lines, without a log beside it."""
    with pytest.raises(CheckpointException) as raised:
        load()
    (error, _) = raised.value.failures[0]
    assert type(error) is StorageError
    assert len(str(raised.value).splitlines()) < 35, str(raised.value)
    return str(error)


def check_missing(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    for step in (9, 10):
        dcp.save(dict(STATE), storage_writer=place.below(f"step-{step}").writer())
    half = place.below("step-11")
    dcp.save(dict(STATE), storage_writer=half.writer())
    half.store().delete([".metadata"])
    caplog.clear()
    said = {
        name: said_by(partial(dcp.load, dict(STATE), storage_reader=place.below(name).reader()))
        for name in ("step-11", "step-12")
    }
    said[""] = said_by(partial(dcp.load, dict(STATE), storage_reader=place.reader()))
    told = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert not [record for record in told if "NullHandler" not in record.name]  # DCP's own events
    for name, text in said.items():
        assert f"no checkpoint at {place.url}/{name}".rstrip("/") in text
        assert "step-9, step-10" in text, text
    assert "no .metadata: a save there did not finish" in said["step-11"]
    assert "does not exist" in said["step-12"] or "nothing is there" in said["step-12"]
    assert "below it" in said[""] and "latest" in said[""]


def test_a_place_without_a_checkpoint(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    check_missing(place, caplog)


@pytest.mark.parametrize("kind", ["s3fs", "obstore"])
def test_a_bucket_that_is_not_there(make_place: Any, kind: str) -> None:
    place = make_place(kind)
    url = "s3://no-such-bucket/run"
    given = {"backend": place.backend, "storage_options": place.options}
    text = said_by(lambda: dcp.load(dict(STATE), storage_reader=StreamingReader(url, **given)))
    assert "no checkpoint at s3://no-such-bucket/run: the bucket" in text
    with pytest.raises(StorageError, match="no-such-bucket/run: the bucket or folder does not"):
        latest(url, **given)


def _missing(rank: int, world: int, path: str) -> str:
    state: dict[str, Any] = {"t": torch.zeros(3)}
    model = torch.nn.Linear(2, 2)
    texts = []
    for planner in (None, FlatOptimLoadPlanner(model, {})):
        try:
            dcp.load(state, storage_reader=StreamingReader(path), planner=planner)
        except CheckpointException as error:
            texts += [f"{type(e).__name__}: {e}" for e, _ in error.failures.values()]
    return "\n".join(texts)


def test_all_ranks_say_so(tmp_path: Path) -> None:
    dcp.save(dict(STATE), storage_writer=StreamingWriter(tmp_path / "step-3"))
    found = run_ranks(_missing, 2, str(tmp_path / "step-4"))
    expected = (
        f"StorageError: no checkpoint at {tmp_path}/step-4: the folder does not exist. "
        "Checkpoints beside it: step-3."
    )
    assert found == ["\n".join([expected] * 4)] * 2


def test_latest_of_no_folder(tmp_path: Path) -> None:
    """An empty folder is how a first run begins; none is how a mistyped path ends."""
    assert latest(tmp_path) is None
    with pytest.raises(StorageError, match="none: the folder does not exist; mend the path"):
        latest(tmp_path / "none")
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="is a file; expected a folder"):
        latest(tmp_path / "file")
