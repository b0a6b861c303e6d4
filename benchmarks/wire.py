"""Counts the bytes that a rank really sends to other ranks, from the kernel's socket counters.

    with WireBytes() as wire:
        dcp.save(...)
    print(wire.tensors, wire.objects)

gloo talks over TCP, on one machine too, and Linux counts what each socket has sent (``TCP_INFO``).
So nothing is assumed of who calls which collective, from which thread.  Counted are sockets whose
peer is not in ``ignore`` (ports: an S3 server's, say).  Bytes that go out while a collective of
pickled objects runs (``dist.gather_object`` and its like, with which DCP exchanges plans) are
``objects``; all others are ``tensors``, barriers included (tens of bytes a rank and barrier).
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist

__all__ = ["WireBytes"]

_OBJECT_COLLECTIVES = (
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
)
_BYTES_SENT = 200  # tcpi_bytes_sent, tcpi_bytes_retrans (u64) in struct tcp_info; Linux >= 4.19
_SETTLE = 0.02
_SAMPLE = 0.02


def _sent_by_socket(ignore: frozenset[int]) -> dict[int, int]:
    """Bytes sent so far, by inode of each connected TCP socket that we hold."""
    sent: dict[int, int] = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names, not paths
        with contextlib.suppress(OSError, ValueError):
            target = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
            if not target.startswith("socket:["):
                continue
            with socket.socket(fileno=os.dup(int(name))) as sock:
                if sock.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                if sock.type != socket.SOCK_STREAM or sock.getpeername()[1] in ignore:
                    continue
                info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            total, again = struct.unpack_from("QQ", info, _BYTES_SENT)
            sent[int(target[8:-1])] = total - again
    return sent


class WireBytes:
    """Context manager; afterwards ``total``, ``objects`` and ``tensors`` are bytes sent by us.

    A thread looks at the sockets now and then, so that one which is opened and closed in
    between is not missed.  One at a time in a process.
    """

    def __init__(self, ignore: Iterable[int] = ()) -> None:
        self._ignore = frozenset(ignore)
        self.total = self.objects = 0

    @property
    def tensors(self) -> int:
        return self.total - self.objects

    def __enter__(self) -> WireBytes:
        self._lock = threading.Lock()
        self._start = _sent_by_socket(self._ignore)
        self._last = dict(self._start)
        self._depth = 0
        self._saved = {name: getattr(dist, name) for name in _OBJECT_COLLECTIVES}
        for name, function in self._saved.items():
            setattr(dist, name, self._as_objects(function))
            setattr(dist.distributed_c10d, name, getattr(dist, name))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        for name, function in self._saved.items():
            setattr(dist, name, function)
            setattr(dist.distributed_c10d, name, function)
        self._stop.set()
        self._thread.join()
        self.total = self._settled()

    def _now(self) -> int:
        with self._lock:
            self._last.update(_sent_by_socket(self._ignore))
            return sum(now - self._start.get(key, 0) for key, now in self._last.items())

    def _settled(self) -> int:
        """The count once it stands still: what was handed to the kernel has left."""
        count, before = self._now(), -1
        while count != before:
            time.sleep(_SETTLE)
            before, count = count, self._now()
        return count

    def _sample(self) -> None:
        while not self._stop.wait(_SAMPLE):
            self._now()

    def _as_objects(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self._depth:  # one object collective built on another
                return function(*args, **kwargs)
            before = self._settled()
            self._depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                self.objects += self._settled() - before

        return counted
