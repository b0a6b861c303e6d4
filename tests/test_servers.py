"""The test servers themselves: what tests and benchmarks rely on them for."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import boto3
import pytest
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from benchmarks.s3_memory import QUARANTINE, SLAB, Arena, Body, OutOfMemoryError
from tests.servers import EmbeddedS3, Fault, fault_proxy, kill, s3_server


@pytest.fixture(scope="module")
def s3() -> Iterator[EmbeddedS3]:
    with s3_server(memory=64 << 20) as server:
        yield server


def client_of(endpoint: Any, **config: Any) -> Any:
    defaults = {"retries": {"total_max_attempts": 1}, "read_timeout": 5}
    return boto3.client("s3", config=Config(**{**defaults, **config}), **endpoint.boto3_options)


@pytest.fixture
def client(s3: EmbeddedS3) -> Any:
    return client_of(s3)


def test_objects_and_ranges(s3: EmbeddedS3, client: Any) -> None:
    data = os.urandom(3 * SLAB + 17)
    client.put_object(Bucket=s3.bucket, Key="a b/ü", Body=data)
    assert client.head_object(Bucket=s3.bucket, Key="a b/ü")["ContentLength"] == len(data)

    def get(span: str) -> bytes:
        return client.get_object(Bucket=s3.bucket, Key="a b/ü", Range=span)["Body"].read()

    assert get(f"bytes={SLAB - 1}-{SLAB}") == data[SLAB - 1 : SLAB + 1]
    assert get("bytes=5-") == data[5:]
    assert get("bytes=-9") == data[-9:]
    assert get(f"bytes=1-{10**9}") == data[1:]
    with pytest.raises(ClientError, match="InvalidRange"):
        get(f"bytes={len(data)}-")
    client.copy_object(
        Bucket=s3.bucket, Key="copy", CopySource={"Bucket": s3.bucket, "Key": "a b/ü"}
    )
    client.delete_object(Bucket=s3.bucket, Key="a b/ü")
    assert client.get_object(Bucket=s3.bucket, Key="copy")["Body"].read() == data
    with pytest.raises(ClientError, match="404"):
        client.head_object(Bucket=s3.bucket, Key="a b/ü")


def test_multipart_and_conditions(s3: EmbeddedS3, client: Any) -> None:
    data = os.urandom(13 << 20)
    config = TransferConfig(multipart_threshold=5 << 20, multipart_chunksize=5 << 20)
    client.upload_fileobj(io.BytesIO(data), s3.bucket, "big", Config=config)
    assert client.get_object(Bucket=s3.bucket, Key="big")["Body"].read() == data
    for key, error in (("big", "PreconditionFailed"), ("new", None)):
        try:
            client.put_object(Bucket=s3.bucket, Key=key, Body=b"x", IfNoneMatch="*")
            found = None
        except ClientError as raised:
            found = raised.response["Error"]["Code"]
        assert found == error
    upload = client.create_multipart_upload(Bucket=s3.bucket, Key="left")["UploadId"]
    assert len(client.list_multipart_uploads(Bucket=s3.bucket)["Uploads"]) == 1
    client.abort_multipart_upload(Bucket=s3.bucket, Key="left", UploadId=upload)
    assert "Uploads" not in client.list_multipart_uploads(Bucket=s3.bucket)


def test_listing_in_pages(s3: EmbeddedS3, client: Any) -> None:
    keys = [f"list/{i}/{j}" for i in range(4) for j in range(3)] + ["list/z", "list/y z"]
    for key in keys:
        client.put_object(Bucket=s3.bucket, Key=key, Body=b"")
    for size in (1, 2, 5, 1000):
        pages = client.get_paginator("list_objects_v2").paginate(
            Bucket=s3.bucket, Prefix="list/", PaginationConfig={"PageSize": size}
        )
        assert [e["Key"] for page in pages for e in page.get("Contents", [])] == sorted(keys)
        pages = client.get_paginator("list_objects_v2").paginate(
            Bucket=s3.bucket, Prefix="list/", Delimiter="/", PaginationConfig={"PageSize": size}
        )
        both = [(p.get("CommonPrefixes", []), p.get("Contents", [])) for p in pages]
        assert [e["Prefix"] for folders, _ in both for e in folders] == [
            f"list/{i}/" for i in range(4)
        ]
        assert [e["Key"] for _, files in both for e in files] == ["list/y z", "list/z"]
    objects = {"Objects": [{"Key": key} for key in keys]}
    client.delete_objects(Bucket=s3.bucket, Delete=objects)
    assert "Contents" not in client.list_objects_v2(Bucket=s3.bucket, Prefix="list/")


def test_counters_latency_and_bandwidth(s3: EmbeddedS3) -> None:
    client = client_of(s3, max_pool_connections=8)
    client.put_object(Bucket=s3.bucket, Key="counted", Body=bytes(1000))

    def get(_: int) -> int:
        return len(client.get_object(Bucket=s3.bucket, Key="counted")["Body"].read())

    s3.reset_stats()
    s3.configure(latency=0.2)
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(get, range(8)))  # connections
            begin = time.monotonic()
            list(pool.map(get, range(8)))
            took = time.monotonic() - begin
        # One after the other they would take 1.6 seconds.
        assert 0.2 <= took < 1.4, "a delay holds up other connections"
        counts = s3.stats()
        assert counts["get"] == counts["requests"] == 16
        assert counts["bytes_out"] == 16_000
        s3.configure(bandwidth=10e6)
        begin = time.monotonic()
        client.put_object(Bucket=s3.bucket, Key="slow", Body=bytes(4 << 20))
        assert time.monotonic() - begin > 0.4
    finally:
        s3.configure()


def test_the_arena_reuses_slabs_after_a_rest() -> None:
    arena = Arena(2 * SLAB)
    first = Body(arena)
    first.space()[:3] = b"abc"
    first.wrote(3)
    assert list(first.extents(1, 3)) == [(1, 2)]
    del first
    second = Body(arena)
    second.space()
    second.wrote(SLAB)
    with pytest.raises(OutOfMemoryError):
        second.space()
    time.sleep(QUARANTINE + 0.1)
    second.space()


def test_the_server_ends_with_the_process_that_started_it() -> None:
    program = (
        "import os, sys\n"
        "from benchmarks.s3_server import s3_server\n"
        "with s3_server() as s3:\n"
        "    print(s3.pid, flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    root = Path(__file__).resolve().parents[1]
    starter = subprocess.run(
        [sys.executable, "-c", program], cwd=root, stdout=subprocess.PIPE, timeout=60, check=False
    )
    assert starter.returncode == -9
    pid = int(starter.stdout)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}/cmdline").exists() and _cmdline(pid):
        assert time.monotonic() < deadline, "the server lives on"
        time.sleep(0.05)


def _cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_a_killed_server_refuses(s3: EmbeddedS3) -> None:
    with s3_server(memory=8 << 20) as other:
        client = client_of(other)
        client.put_object(Bucket=other.bucket, Key="x", Body=b"x")
        kill(other.pid)
        with pytest.raises(BotoCoreError):
            client.get_object(Bucket=other.bucket, Key="x")


@pytest.mark.parametrize(
    "fault, works",
    [
        (Fault.status(503), False),
        (Fault.reset(), False),
        (Fault.reset(100), False),
        (Fault.truncate(100), False),
        (Fault.stall(), False),
        (Fault.stall(100), False),
        (Fault.lose_answer(), False),
        (Fault.delay(0.2), True),
    ],
    ids=lambda value: f"{value.kind}-{value.after}" if isinstance(value, Fault) else "",
)
def test_the_proxy_strikes_the_requests_it_is_told_to(
    s3: EmbeddedS3, fault: Fault, works: bool
) -> None:
    with fault_proxy(s3) as proxy:
        client = client_of(proxy.s3, read_timeout=1)
        client.put_object(Bucket=s3.bucket, Key="struck", Body=b"y" * 5000)
        rule = proxy.inject(fault, method="GET", path="struck", skip=1)
        answers = []
        for _ in range(3):
            try:
                body = client.get_object(Bucket=s3.bucket, Key="struck")["Body"].read()
                answers.append(body == b"y" * 5000)
            except (BotoCoreError, ClientError):
                answers.append(False)
        assert answers == [True, works, True]
        assert rule.hits == 1
        assert [request.fault for request in proxy.seen("GET")] == [None, fault, None]


def test_the_proxy_can_let_a_request_take_effect_and_lose_its_answer(s3: EmbeddedS3) -> None:
    with fault_proxy(s3) as proxy:
        client = client_of(proxy.s3)
        proxy.inject(Fault.lose_answer(), method="PUT")
        with pytest.raises(BotoCoreError):
            client.put_object(Bucket=s3.bucket, Key="lost", Body=b"done")
        assert client.get_object(Bucket=s3.bucket, Key="lost")["Body"].read() == b"done"
        proxy.inject(Fault.reset_upload(2), method="PUT")
        with pytest.raises(BotoCoreError):
            client.put_object(Bucket=s3.bucket, Key="lost", Body=b"undone")
        assert client.get_object(Bucket=s3.bucket, Key="lost")["Body"].read() == b"done"


@pytest.mark.slow
def test_the_storage_benchmark_runs(tmp_path: Path) -> None:
    """World size 2, smallest state: every variant loads what was saved (it checks that itself)."""
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "benchmarks.storage", "--mib", "64", "--rounds", "1"]
    command += ["--worlds", "1", "2", "--only", "disk", "s3", "--json", str(out)]
    root = Path(__file__).resolve().parents[1]
    subprocess.run(command, cwd=root, timeout=300, check=True)
    results = json.loads(out.read_text())["results"]
    assert {(r["kind"], r["place"]) for r in results} == {
        (kind, place) for kind in ("save", "load") for place in ("disk", "s3 0 ms", "s3 30 ms")
    }
    assert all(found["wall"] > 0 for r in results for found in r["variants"].values())
