"""HTTP of the benchmark's S3 server: one connection, kept alive, on a thread of its own."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from urllib.parse import parse_qsl, unquote

from benchmarks.s3_memory import Body, OutOfMemoryError
from benchmarks.s3_protocol import Failure, Reply, Request, Service

__all__ = ["serve_connection"]

_SOCKET_BUFFER = 4 << 20
_LIMITED_STEP = 256 << 10
_HEAD_LIMIT = 64 << 10
_SIDE = ("_stats", "_reset", "_config")


class _Closed(Exception):
    """The client went away."""


class _Source:
    """Bytes from the socket: lines and heads through a small buffer, bodies past it."""

    def __init__(self, connection: socket.socket, service: Service) -> None:
        self._socket = connection
        self._service = service
        self._ahead = b""

    def _more(self) -> None:
        data = self._socket.recv(_HEAD_LIMIT)
        if not data:
            raise _Closed
        self._ahead += data

    def until(self, mark: bytes) -> bytes:
        """Bytes before the next ``mark``; the mark itself is taken too."""
        while mark not in self._ahead:
            if len(self._ahead) > _HEAD_LIMIT:
                raise _Closed
            self._more()
        found, _, self._ahead = self._ahead.partition(mark)
        return found

    def body(self, body: Body, size: int) -> None:
        """Take ``size`` bytes into ``body``."""
        limiter = self._service.limiter
        while size:
            space = body.space()[: min(size, _LIMITED_STEP if limiter.rate else size)]
            if self._ahead:
                count = min(len(self._ahead), len(space))
                space[:count] = self._ahead[:count]
                self._ahead = self._ahead[count:]
            else:
                count = self._socket.recv_into(space, len(space), socket.MSG_WAITALL)
                if not count:
                    raise _Closed
            body.wrote(count)
            limiter.pay(count)
            size -= count

    def chunks(self, body: Body) -> None:
        """Take a body in chunks, HTTP's or those of ``aws-chunked`` (signatures not checked)."""
        while True:
            size = int(self.until(b"\r\n").partition(b";")[0], 16)
            if size == 0:
                while self.until(b"\r\n"):  # trailers
                    pass
                return
            self.body(body, size)
            self.until(b"\r\n")


def serve_connection(connection: socket.socket, service: Service) -> None:
    """Answer requests until the client closes."""
    with contextlib.suppress(_Closed, ConnectionError, TimeoutError), connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connection.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER)
        source = _Source(connection, service)
        while _serve_one(connection, source, service):
            pass


def _serve_one(connection: socket.socket, source: _Source, service: Service) -> bool:
    """One request and its answer; false where the connection ends with it."""
    line, *rest = source.until(b"\r\n\r\n").decode("latin-1").split("\r\n")
    method, target, _ = line.split(" ")
    headers = {}
    for header in rest:
        name, _, value = header.partition(":")
        headers[name.strip().lower()] = value.strip()
    if headers.get("expect", "").lower() == "100-continue":
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
    try:
        body = _read_body(source, service, headers)
    except OutOfMemoryError as error:
        text = Failure(507, "InsufficientStorage", str(error)).reply()
        _send(connection, text, service, method="PUT", close=True)
        return False
    path, _, query = target.partition("?")
    bucket, _, key = path.lstrip("/").partition("/")
    request = Request(
        method,
        unquote(bucket),
        unquote(key),
        dict(parse_qsl(query, keep_blank_values=True)),
        headers,
        body,
    )
    if request.bucket in _SIDE:
        reply = service.side(request)
    else:
        reply = service.handle(request)
        service.count(reply, body.size)
        if service.latency:
            time.sleep(service.latency)
    close = headers.get("connection", "").lower() == "close"
    _send(connection, reply, service, method=method, close=close)
    return not close


def _read_body(source: _Source, service: Service, headers: dict[str, str]) -> Body:
    body = Body(service.arena)
    chunked = headers.get("transfer-encoding", "").lower() == "chunked"
    streamed = headers.get("x-amz-content-sha256", "").startswith("STREAMING-")
    if streamed and chunked:
        raise _Closed  # two layers of chunks: no client that we know sends them
    if streamed or chunked:
        source.chunks(body)
    else:
        source.body(body, int(headers.get("content-length", "0")))
    return body


def _send(
    connection: socket.socket, reply: Reply, service: Service, *, method: str, close: bool
) -> None:
    size = len(reply.text) if reply.ranged is None else reply.ranged[2] - reply.ranged[1]
    lines = [f"HTTP/1.1 {reply.status} S3"]
    lines += [f"{name}: {value}" for name, value in reply.headers]
    if not any(name == "Content-Length" for name, _ in reply.headers) and reply.status != 204:
        lines.append(f"Content-Length: {size}")
    lines.append("x-amz-request-id: 1")
    lines.append("Connection: close" if close else "Connection: keep-alive")
    head = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
    text = b"" if method == "HEAD" else reply.text
    if reply.ranged is None or method == "HEAD":
        connection.sendall(head + text)
        return
    connection.sendall(head, socket.MSG_MORE)
    stored, start, stop = reply.ranged
    for body in stored.bodies:
        if start < body.size and stop > 0:
            for offset, count in body.extents(max(0, start), min(stop, body.size)):
                _send_extent(connection, service, offset, count)
        start, stop = start - body.size, stop - body.size


def _send_extent(connection: socket.socket, service: Service, offset: int, count: int) -> None:
    """``count`` bytes of the arena from ``offset``, straight from its pages."""
    limiter = service.limiter
    while count:
        step = min(count, _LIMITED_STEP) if limiter.rate else count
        sent = os.sendfile(connection.fileno(), service.arena.fd, offset, step)
        if not sent:
            raise _Closed
        limiter.pay(sent)
        offset, count = offset + sent, count - sent
