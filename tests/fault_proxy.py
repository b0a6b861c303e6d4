"""An HTTP proxy that injects faults between a client and a real S3 server, and records requests.

    with moto_server() as s3, fault_proxy(s3) as proxy:
        proxy.inject(Fault.status(503), method="GET", path=".metadata", times=2)
        ...                      # use proxy.s3 in place of s3
        assert [r.status for r in proxy.seen("GET", ".metadata")] == [503, 503, 200]

Requests are forwarded as they are (the Host header too, so signatures hold).
"""

from __future__ import annotations

import contextlib
import http.client
import io
import re
import socket
import struct
import threading
from collections.abc import Container, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import urlsplit

from benchmarks.s3_server import S3Endpoint

__all__ = ["Fault", "FaultProxy", "Recorded", "Rule", "fault_proxy"]

_CODES = {
    400: "ExpiredToken",
    403: "AccessDenied",
    404: "NoSuchKey",
    408: "RequestTimeout",
    409: "ConditionalRequestConflict",
    412: "PreconditionFailed",
    429: "TooManyRequests",
    500: "InternalError",
    501: "NotImplemented",
    502: "BadGateway",
    503: "SlowDown",
    504: "GatewayTimeout",
}


@dataclass(frozen=True)
class Fault:
    """What to do to one request; made by the class methods."""

    kind: str
    code: int = 0
    after: int = 0
    seconds: float = 0.0

    @classmethod
    def status(cls, code: int) -> Fault:
        """Answer with this status and S3's error text for it; the server never sees the request."""
        return cls("status", code=code)

    @classmethod
    def reset(cls, after: int = 0) -> Fault:
        """Reset the connection (RST) once ``after`` bytes of the answer's body are sent."""
        return cls("reset", after=after)

    @classmethod
    def reset_upload(cls, after: int = 0) -> Fault:
        """Reset the connection once ``after`` bytes of the request's body are received."""
        return cls("reset_upload", after=after)

    @classmethod
    def truncate(cls, after: int) -> Fault:
        """Close in good order after ``after`` bytes of a body that was announced whole."""
        return cls("truncate", after=after)

    @classmethod
    def stall(cls, after: int = -1) -> Fault:
        """Say nothing more, ever: at once, or ``after`` bytes of the answer's body."""
        return cls("stall", after=after)

    @classmethod
    def lose_answer(cls) -> Fault:
        """Let the request take effect, then reset the connection in place of the answer."""
        return cls("lose_answer")

    @classmethod
    def delay(cls, seconds: float) -> Fault:
        """Wait, then go on as usual."""
        return cls("delay", seconds=seconds)


@dataclass
class Rule:
    """A fault and the requests that it strikes.

    ``hits`` counts those struck so far; ``struck`` is the last of them.
    """

    fault: Fault
    method: str
    path: re.Pattern[str]
    skip: int
    times: int
    after: Rule | None
    header: str = ""
    hits: int = 0
    matched: int = 0
    struck: str = ""


@dataclass
class Recorded:
    """A request as the proxy saw it.

    ``status`` is what the client was sent, 0 while or where that is nothing whole; ``length`` is
    of the request's body.
    """

    method: str
    path: str
    range: str | None
    length: int
    status: int
    fault: Fault | None


class FaultProxy:
    """The running proxy.  ``s3`` is the upstream's endpoint with the proxy's address."""

    def __init__(self, upstream: S3Endpoint) -> None:
        proxy = self

        class Handler(_Handler):
            owner = proxy

        parts = urlsplit(upstream.endpoint_url)
        assert parts.hostname is not None and parts.port is not None
        self.upstream = (parts.hostname, parts.port)
        self.stopped = threading.Event()
        self.lock = threading.Lock()
        self.requests: list[Recorded] = []
        self.dropped: set[str] = set()
        """Names of headers, in lower case, that the server does not get: as if it ignored them."""
        self._rules: list[Rule] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self.s3 = upstream.behind(f"http://127.0.0.1:{self._server.server_port}")
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), daemon=True
        )
        self._thread.start()

    def inject(
        self,
        fault: Fault,
        *,
        method: str = "",
        path: str = "",
        skip: int = 0,
        times: int = 1,
        after: Rule | None = None,
        header: str = "",
    ) -> Rule:
        """Strike ``times`` requests (-1: all) whose target matches the regular expression ``path``.

        The target is the path with its query, percent-encoded.  The first ``skip`` matches
        pass unharmed; with ``after``, so do those before that rule's first hit; with ``header``, so
        do those without it.  The first rule that applies wins.
        """
        rule = Rule(fault, method, re.compile(path), skip, times, after, header)
        with self.lock:
            self._rules.append(rule)
        return rule

    def clear(self) -> None:
        """Forget all rules and all recorded requests."""
        with self.lock:
            self._rules.clear()
            self.requests.clear()

    def seen(self, method: str = "", path: str = "") -> list[Recorded]:
        """Recorded requests of this method whose target matches the regular expression ``path``."""
        with self.lock:
            return [
                r for r in self.requests if method in ("", r.method) and re.search(path, r.path)
            ]

    def stop(self) -> None:
        self.stopped.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def strike(self, method: str, target: str, headers: Container[str] = ()) -> Fault | None:
        with self.lock:
            for rule in self._rules:
                if rule.method not in ("", method) or not rule.path.search(target):
                    continue
                if rule.header and rule.header not in headers:
                    continue
                if rule.after is not None and not rule.after.hits:
                    continue
                rule.matched += 1
                spent = rule.times != -1 and rule.hits >= rule.times
                if rule.matched > rule.skip and not spent:
                    rule.hits += 1
                    rule.struck = f"{method} {target}"
                    return rule.fault
        return None


@contextlib.contextmanager
def fault_proxy(upstream: S3Endpoint) -> Iterator[FaultProxy]:
    """Run a proxy in front of ``upstream`` on threads of this process."""
    proxy = FaultProxy(upstream)
    try:
        yield proxy
    finally:
        proxy.stop()


class _Broken(Exception):
    """The connection was ended by a fault."""


class _Handler(BaseHTTPRequestHandler):
    owner: ClassVar[FaultProxy]
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *args: object) -> None:
        pass

    def _serve(self) -> None:
        fault = self.owner.strike(self.command, self.path, self.headers)
        self.body = b""
        self.record = Recorded(
            self.command,
            self.path,
            self.headers.get("Range"),
            int(self.headers.get("Content-Length", "0")),
            0,
            fault,
        )
        with self.owner.lock:
            self.owner.requests.append(self.record)
        try:
            self._act(fault)
        except (_Broken, ConnectionError):
            self.close_connection = True

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve

    def _act(self, fault: Fault | None) -> None:
        kind = fault.kind if fault is not None else ""
        length = self.record.length
        if fault is not None and kind == "reset_upload":
            self.body = self.rfile.read(min(fault.after, length))
            self._reset()
        self.body = self.rfile.read(length)
        if fault is not None and kind == "delay":
            self.owner.stopped.wait(fault.seconds)
        if fault is not None and kind == "status":
            self._refuse(fault.code)
            return
        if fault is not None and kind == "stall" and fault.after < 0:
            self._stall()
        self._forward(fault)

    def _refuse(self, code: int) -> None:
        name = _CODES.get(code, "Injected")
        text = f"<Error><Code>{name}</Code><Message>injected</Message></Error>".encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.record.status = code
        if self.command != "HEAD":
            self.wfile.write(text)

    def _reset(self) -> None:
        self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        # rfile and wfile hold the descriptor too: it is closed, and the RST sent, once they go.
        held = (self.wfile, self.rfile, self.connection)
        self.rfile, self.wfile = io.BytesIO(), io.BytesIO()
        for each in held:
            with contextlib.suppress(OSError):
                each.close()
        raise _Broken

    def _stall(self) -> None:
        self.wfile.flush()
        self.owner.stopped.wait()
        raise _Broken

    def _forward(self, fault: Fault | None) -> None:
        upstream = http.client.HTTPConnection(*self.owner.upstream, timeout=60)
        with contextlib.closing(upstream):
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in {"connection", "expect", *self.owner.dropped}:
                    upstream.putheader(name, value)
            upstream.endheaders(self.body)
            answer = upstream.getresponse()
            announced = answer.getheader("Content-Length")
            body = b"" if self.command == "HEAD" else answer.read()
        if fault is not None and fault.kind == "lose_answer":
            self._reset()
        # send_response would add a Server and a Date of its own.
        self.send_response_only(answer.status, answer.reason)
        for name, value in answer.getheaders():
            if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                self.send_header(name, value)
        if answer.status not in (204, 304):
            size = announced if self.command == "HEAD" and announced else len(body)
            self.send_header("Content-Length", str(size))
        self.end_headers()
        if fault is not None and fault.kind in ("reset", "truncate", "stall"):
            self.wfile.write(body[: fault.after])
            if fault.kind == "reset":
                self._reset()
            if fault.kind == "stall":
                self._stall()
            raise _Broken
        self.record.status = answer.status
        self.wfile.write(body)
