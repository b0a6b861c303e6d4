"""Reads that end late, servers that answer wrongly, files that are something else."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter

from dcp_fsdp_osd.errors import UnsafeCheckpointError
from dcp_fsdp_osd.storage import StreamingReader, local_store
from dcp_fsdp_osd.storage.store import Seen, check_name
from dcp_fsdp_osd.storage.transfer import RetryPolicy
from tests.servers import Fault, fault_proxy
from tests.storage.attacks.case import Attack, Gives, Refused
from tests.storage.conftest import Place
from tests.storage.fakes import Script, ScriptedStore
from tests.storage.states import assert_same, load

STATE = {"w": torch.arange(60_000.0).view(100, 600), "v": torch.arange(5000)}
OTHER = {name: tensor + 1 for name, tensor in STATE.items()}
QUICK = RetryPolicy(tries=2, seconds=5, first=0.001, longest=0.01)


# ---- a read that ends after its load ----


class LateStore(ScriptedStore):
    """Somebody's own store, which writes into what it was given when it wakes up."""

    def read_into(
        self, name: str, offset: int, pieces: Sequence[memoryview], seen: Seen | None = None
    ) -> None:
        if name.endswith(".distcp"):
            time.sleep(1.5)
            for piece in pieces:
                with contextlib.suppress(ValueError):
                    piece[:] = bytes([7]) * len(piece)
        super().read_into(name, offset, pieces, seen)


@contextlib.contextmanager
def _stalled_disk() -> Iterator[None]:
    """Reads of more than a little hang in the system call for a while, then go on."""
    real = os.preadv

    def preadv(fd: int, buffers: Any, offset: int) -> int:
        if sum(map(len, buffers)) > 1000:
            time.sleep(1.5)
        return real(fd, buffers, offset)

    local_store.os.preadv = preadv  # type: ignore[attr-defined]
    try:
        yield
    finally:
        local_store.os.preadv = real  # type: ignore[attr-defined]


def a_late_read(place: Place, *, backend: Any = None) -> Any:
    dcp.save(dict(STATE), storage_writer=place.below("one").writer())
    dcp.save(dict(OTHER), storage_writer=place.below("two").writer())
    target = {name: torch.zeros_like(tensor) for name, tensor in STATE.items()}
    with contextlib.ExitStack() as stack:
        options = dict(place.options)
        if place.endpoint is not None:
            proxy = stack.enter_context(fault_proxy(place.endpoint))
            proxy.inject(Fault.delay(1.5), method="GET", path=r"distcp", times=-1)
            if place.kind == "obstore":
                options = {**proxy.s3.obstore_options}
                options["client_options"] = {
                    **(options.get("client_options") or {}),
                    "timeout": "10s",
                }
            else:
                options = dict(proxy.s3.storage_options)
        elif backend is None:
            stack.enter_context(_stalled_disk())
        reader = StreamingReader(
            place.below("one").url,
            backend=backend or place.backend,
            storage_options=options,
            stall_seconds=0.6,
            retry=QUICK,
        )
        begin = time.monotonic()
        try:
            dcp.load(target, storage_reader=reader)
        except CheckpointException:
            pass
        else:
            raise AssertionError("the stall went by without notice")
        for name, tensor in OTHER.items():  # the fallback, in the same memory
            target[name].copy_(tensor)
        time.sleep(max(0.0, begin + 3.0 - time.monotonic()))
    return target


def a_late_read_of_a_stranger(place: Place) -> Any:
    return a_late_read(place, backend=lambda config: LateStore(config, Script()))


# ---- what autograd saved ----


def a_load_into_what_autograd_saved(place: Place) -> Any:
    dcp.save(dict(STATE), storage_writer=place.writer())
    weight = torch.ones(100, 600, requires_grad=True)
    held = torch.ones(100, 600)
    loss = (weight * held).sum()
    dcp.load({"w": held}, storage_reader=place.reader())
    try:
        loss.backward()
    except RuntimeError as error:
        return "modified by an inplace operation" in str(error)
    return f"a gradient of {weight.grad}"


# ---- servers that answer wrongly ----


class _Liar(BaseHTTPRequestHandler):
    """Serves files of a folder: other ranges than were asked for, or all of the file."""

    folder: Path
    how: str

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.folder / self.path.partition("?")[0].rpartition("/")[2]
        if not path.is_file():
            self.send_error(404)
            return
        data = path.read_bytes()
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked and not self.how.startswith("ignored"):
            begin, end = int(asked[1]), int(asked[2]) + 1
            if self.how == "shifted":
                shift = -1 if end >= len(data) else 1
                shift = shift if begin + shift >= 0 else 0
                begin, end = begin + shift, end + shift
            total, data = len(data), data[begin:end]
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {begin}-{begin + len(data) - 1}/{total}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", '"x"')
        self.send_header("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT")
        self.end_headers()
        if self.command == "GET":
            with contextlib.suppress(OSError):
                self.wfile.write(data)


def from_a_liar(how: str, client: str) -> Callable[[Place], Any]:
    def attack(place: Place) -> Any:
        dcp.save(dict(STATE), storage_writer=FileSystemWriter(place.url))

        class Handler(_Liar):
            folder = Path(place.url)

        Handler.how = how
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        options: dict[str, Any] = {}
        url = f"{address}/c"
        if client == "s3fs":
            url = "s3://bucket/c"
            options = {"key": "a", "secret": "b", "endpoint_url": address}
        elif client == "obstore":
            url = "s3://bucket/c"
            options = {
                "access_key_id": "a", "secret_access_key": "b", "endpoint": address,
                "region": "us-east-1", "client_options": {"allow_http": True},
            }  # fmt: skip
        backend = "obstore" if client == "obstore" else "fsspec"
        reader = StreamingReader(url, backend=backend, storage_options=options, retry=QUICK)
        try:
            assert_same(load(reader, STATE), STATE)
        finally:
            server.shutdown()
            server.server_close()

    return attack


# ---- files that are something else ----


def a_pipe(name: str) -> Callable[[Place], Any]:
    def attack(place: Place) -> None:
        dcp.save(dict(STATE), storage_writer=place.writer())
        path = next(Path(place.url).glob(name))
        path.unlink()
        os.mkfifo(path)
        load(place.reader(stall_seconds=2), STATE)

    return attack


EXIT = """
import os, sys, time, torch, warnings
import torch.distributed.checkpoint as dcp
from dcp_fsdp_osd.storage import StreamingReader, local_store
warnings.simplefilter("ignore")
real = os.preadv
def preadv(fd, buffers, offset):
    if sum(map(len, buffers)) > 1000:
        time.sleep(1000)
    return real(fd, buffers, offset)
local_store.os.preadv = preadv
try:
    dcp.load({"w": torch.zeros(100, 600)},
             storage_reader=StreamingReader(sys.argv[1], stall_seconds=0.5))
except BaseException as error:
    print("raised", type(error).__name__)
"""


def exit_after_a_stall(place: Place) -> Any:
    dcp.save(dict(STATE), storage_writer=place.writer())
    done = subprocess.run(
        [sys.executable, "-c", EXIT, place.url],
        check=False,
        capture_output=True,
        text=True,
        timeout=50,
    )
    return done.returncode, done.stdout.strip()


def climbing(name: str) -> Callable[[Place], Any]:
    def attack(place: Place) -> Any:
        try:
            check_name(name)
        except UnsafeCheckpointError:
            return "refused"
        return "accepted"

    return attack


CASES = [
    Attack("a read that ends after its load", a_late_read, Gives(OTHER)),
    Attack("the same by somebody's own store", a_late_read_of_a_stranger, Gives(OTHER), ("local",)),
    Attack("a load into what autograd saved", a_load_into_what_autograd_saved, Gives(True)),
    *(
        Attack(
            f"{how} ranges from {client}", from_a_liar(how, client), Refused(text), ("local",), 30
        )
        for how, text in (("shifted", "(?i)requested|sends other"), ("ignored", "(?i)range"))
        for client in ("s3fs", "http", "obstore")
    ),
    Attack("a pipe for .metadata", a_pipe(".metadata"), Refused("regular file"), ("local",)),
    Attack("a pipe for data", a_pipe("*.distcp"), Refused("regular file"), ("local",)),
    Attack(
        "the process ends after a stall",
        exit_after_a_stall,
        Gives((0, "raised CheckpointException")),
        ("local",),
        60,
    ),
    *(
        Attack(f"a file named {name}", climbing(name), Gives("refused"), ("local",))
        for name in ("%2e%2e/x", "a/%2E%2E/b", "%2e%2e%2fx", "%252e%252e/x", "%2fetc", "a%5c..%5cb")
    ),
]
