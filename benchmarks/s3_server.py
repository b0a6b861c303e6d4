"""An S3 server for benchmarks: in memory, fast, with a latency and a bandwidth to choose.

    with s3_server(latency=0.03) as s3:
        writer = StreamingWriter(f"s3://{s3.bucket}/run", storage_options=s3.storage_options)
        ...
        print(s3.stats())

It runs in a process of its own (``python -m benchmarks.s3_server``), on 127.0.0.1, and ends with
the process that started it, even when that one is killed.  Path-style addresses only.  It
knows GET with ranges, HEAD, PUT, CopyObject, multipart uploads, DELETE, bulk delete, list (v1,
v2), ``If-Match`` and ``If-None-Match``.  It leaves out what a benchmark would have to pay for:
signatures and checksums are accepted and not checked, an ETag is a serial number.

Every connection has a thread; a delay sleeps in that thread alone.  Bodies move with
``recv_into`` and ``sendfile`` between the socket and one arena (:mod:`benchmarks.s3_memory`), so
the GIL is held for a few microseconds a request.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["EmbeddedS3", "S3Endpoint", "s3_server"]

ACCESS_KEY = "benchmark"
SECRET_KEY = "benchmark-secret"
REGION = "us-east-1"
BUCKET = "bucket"


@dataclass(frozen=True)
class S3Endpoint:
    """Where an S3 server is and what clients need to talk to it (path-style addresses).

    ``storage_options`` are s3fs's; ``obstore_options`` are keyword arguments of
    ``obstore.store.S3Store``; ``boto3_options`` those of ``boto3.client("s3", ...)``.
    """

    endpoint_url: str
    bucket: str = BUCKET
    access_key: str = ACCESS_KEY
    secret_key: str = SECRET_KEY
    region: str = REGION

    @property
    def storage_options(self) -> dict[str, Any]:
        return {
            "key": self.access_key,
            "secret": self.secret_key,
            "endpoint_url": self.endpoint_url,
            "client_kwargs": {"region_name": self.region},
        }

    @property
    def obstore_options(self) -> dict[str, Any]:
        return {
            "access_key_id": self.access_key,
            "secret_access_key": self.secret_key,
            "endpoint": self.endpoint_url,
            "region": self.region,
            "client_options": {"allow_http": True},
        }

    @property
    def boto3_options(self) -> dict[str, Any]:
        return {
            "aws_access_key_id": self.access_key,
            "aws_secret_access_key": self.secret_key,
            "endpoint_url": self.endpoint_url,
            "region_name": self.region,
        }

    def url(self, path: str) -> str:
        """``s3://`` address of ``path`` in the server's bucket."""
        return f"s3://{self.bucket}/{path}"

    def behind(self, proxy_url: str) -> S3Endpoint:
        """The same server reached at another address (a proxy's)."""
        return S3Endpoint(proxy_url, self.bucket, self.access_key, self.secret_key, self.region)


@dataclass(frozen=True)
class EmbeddedS3(S3Endpoint):
    """The benchmark server while it runs; ``pid`` is its process."""

    pid: int = 0

    def configure(self, *, latency: float = 0.0, bandwidth: float | None = None) -> None:
        """Set seconds of delay a request, and bytes a second over all connections (None: no limit).

        Takes effect for requests that begin afterwards.
        """
        self._side("_config", {"latency": latency, "bandwidth": bandwidth})

    def stats(self) -> dict[str, int]:
        """Requests by kind, ``requests`` in all, ``bytes_in`` and ``bytes_out`` since the reset."""
        return self._side("_stats")

    def reset_stats(self) -> dict[str, int]:
        """Set the counters to 0 and return what they were."""
        return self._side("_reset", {})

    def _side(self, name: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        # The side endpoint is outside of what is counted, delayed and limited.
        with urllib.request.urlopen(f"{self.endpoint_url}/{name}", data, timeout=30) as reply:
            return json.load(reply)


@contextlib.contextmanager
def s3_server(
    *,
    latency: float = 0.0,
    bandwidth: float | None = None,
    memory: int = 12 << 30,
    prewarm: int = 0,
    start_timeout: float = 30.0,
) -> Iterator[EmbeddedS3]:
    """Run the server in a process of its own; it is killed on leaving the block.

    ``memory`` is the most bytes it holds (507 beyond that); the first ``prewarm`` of them are
    touched before the block begins, so that no client pays for the server's page faults.
    """
    command = [sys.executable, "-m", "benchmarks.s3_server", "--memory", str(memory)]
    command += ["--latency", str(latency), "--prewarm", str(prewarm)]
    if bandwidth is not None:
        command += ["--bandwidth", str(bandwidth)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).resolve().parents[1],
    )
    killer = threading.Timer(start_timeout, process.kill)
    killer.start()
    try:
        assert process.stdout is not None
        line = process.stdout.readline().decode()
        if not line.startswith("http://"):
            raise RuntimeError(f"the S3 server did not start within {start_timeout} s: {line!r}")
        killer.cancel()
        yield EmbeddedS3(line.strip(), pid=process.pid)
    finally:
        killer.cancel()
        process.kill()
        process.communicate()


def _serve(listener: socket.socket, service: Any) -> None:
    from benchmarks.s3_http import serve_connection

    while True:
        connection, _ = listener.accept()
        threading.Thread(target=serve_connection, args=(connection, service), daemon=True).start()


def main() -> None:
    """Serve until standard input ends; the first line printed is the address."""
    from benchmarks.s3_memory import Arena
    from benchmarks.s3_protocol import Service

    parser = argparse.ArgumentParser(description="In-memory S3 server for benchmarks.")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--latency", type=float, default=0.0, help="seconds a request")
    parser.add_argument("--bandwidth", type=float, help="bytes a second, over all connections")
    parser.add_argument("--memory", type=int, default=12 << 30, help="bytes held at most")
    parser.add_argument("--prewarm", type=int, default=0, help="bytes touched at the start")
    parser.add_argument("--forever", action="store_true", help="do not end with standard input")
    options = parser.parse_args()

    arena = Arena(options.memory, prewarm=options.prewarm)
    service = Service(arena, latency=options.latency, bandwidth=options.bandwidth)
    service.buckets[BUCKET] = {}
    listener = socket.create_server(("127.0.0.1", options.port), backlog=512)
    threading.Thread(target=_serve, args=(listener, service), daemon=True).start()
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    if options.forever:
        while True:
            time.sleep(3600)
    # The pipe ends when the parent does, whatever it dies of.
    while os.read(0, 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
