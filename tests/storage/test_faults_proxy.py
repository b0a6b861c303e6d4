"""Faults of a real S3 server, injected into real connections: retried, then raised; never a hang.

The proxy stands between the client and the embedded server.  One process saves and loads, except
where the subject is ranks that must not hang.
"""

from __future__ import annotations

import itertools
import re
import socket
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from dcp_fsdp_osd.errors import CorruptCheckpointError, StorageError
from dcp_fsdp_osd.storage import StreamingReader, StreamingWriter, latest
from dcp_fsdp_osd.storage.transfer import RetryPolicy
from tests.breadth import always
from tests.servers import EmbeddedS3, Fault, FaultProxy, S3Endpoint, fault_proxy, s3_server
from tests.storage.killable import SURVIVORS_END_WITHIN, Crew, Task

pytestmark = pytest.mark.filterwarnings("ignore")

DATA, METADATA = r"distcp", r"\.metadata(\?|$)"
BACKENDS = ["obstore", "fsspec"]
SLOW_FSSPEC = pytest.param("fsspec", marks=pytest.mark.slow)
#: A client may try a few times by itself within each of our tries.
RETRY = RetryPolicy(tries=3, seconds=20.0, first=0.01, longest=0.1)
#: ``stall_seconds`` where the server says nothing, and what a load and a save may then take at
#: most; the stated limit of a save is six times that, and the time of retrying, here next to none.
STALL, STALLED_WITHIN, SILENT_SAVE_WITHIN = 1.0, 10.0, 12.0


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedS3]:
    with s3_server(memory=1 << 30) as s3:
        yield s3


@pytest.fixture(scope="module")
def proxies(server: EmbeddedS3) -> Iterator[FaultProxy]:
    with fault_proxy(server) as proxy:
        yield proxy


@pytest.fixture
def proxy(proxies: FaultProxy) -> Iterator[FaultProxy]:
    """One proxy for the module, without rules of an earlier test."""
    proxies.clear()
    yield proxies
    proxies.clear()


_names = itertools.count()


class Checkpoint:
    """A place of its own on a server, by one backend, directly or through a proxy."""

    def __init__(self, s3: S3Endpoint, backend: str, name: str | None = None) -> None:
        self.name = name or f"faults-{next(_names)}"
        self.s3, self.backend = s3, backend
        self.root = s3.url(self.name)
        options = s3.obstore_options if backend == "obstore" else s3.storage_options
        self.store: dict[str, Any] = {"backend": backend, "storage_options": options}

    def through(self, proxy: FaultProxy) -> Checkpoint:
        return Checkpoint(proxy.s3, self.backend, self.name)

    def save(self, state: dict[str, Any], *, stall: float = 20.0, overwrite: bool = False) -> None:
        writer = StreamingWriter(
            f"{self.root}/step-1",
            stall_seconds=stall,
            retry=RETRY,
            overwrite=overwrite,
            **self.store,
        )
        dcp.save(state, storage_writer=writer, no_dist=True)

    def load(
        self, like: dict[str, Any], planner: Any = None, *, stall: float = 20.0
    ) -> dict[str, Any]:
        state = {key: torch.zeros_like(tensor) for key, tensor in like.items()}
        reader = StreamingReader(
            f"{self.root}/step-1", stall_seconds=stall, retry=RETRY, **self.store
        )
        dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)
        return state

    def holds(self, state: dict[str, Any]) -> bool:
        """Whether just this state loads; a checkpoint that cannot be loaded raises."""
        found = self.load(state)
        return all(torch.equal(found[key], state[key]) for key in state)


def make_state(seed: int, mib: float = 0.5) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = int(mib * 256)
    return {
        "a": torch.randn(rows, 512, generator=generator),
        "b": torch.randn(rows, 512, generator=generator),
        **{f"step.{i}": torch.tensor(float(seed * 10 + i)) for i in range(5)},
    }


def cause_of(raised: pytest.ExceptionInfo[CheckpointException]) -> BaseException:
    (failure,) = raised.value.failures.values()
    return failure[0]


TRANSIENT = {
    "503": Fault.status(503),
    "500": Fault.status(500),
    "expired": Fault.status(400),
    "reset": Fault.reset(),
    "reset in the body": Fault.reset(100_000),
    "cut off": Fault.truncate(100_000),
    "lost answer": Fault.lose_answer(),
}


@pytest.mark.each_value
@pytest.mark.parametrize("fault", list(TRANSIENT))
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_load_outlives_transient_faults(
    server: EmbeddedS3, proxy: FaultProxy, backend: str, fault: str
) -> None:
    place, state = Checkpoint(server, backend), make_state(1)
    place.save(state)
    rules = [
        proxy.inject(TRANSIENT[fault], method="GET", path=DATA),
        proxy.inject(TRANSIENT[fault], method="GET", path=METADATA),
    ]
    assert place.through(proxy).holds(state)
    assert [rule.hits for rule in rules] == [1, 1]


@pytest.mark.each_value
@pytest.mark.parametrize("fault", ["503", "500", "expired", "reset", "lost answer", "upload"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_save_outlives_transient_faults(
    server: EmbeddedS3, proxy: FaultProxy, backend: str, fault: str
) -> None:
    place, state = Checkpoint(server, backend), make_state(2)
    injected = Fault.reset_upload(1000) if fault == "upload" else TRANSIENT[fault]
    rules = [
        proxy.inject(injected, method="PUT", path=DATA),
        proxy.inject(injected, method="PUT", path=METADATA),
    ]
    place.through(proxy).save(state)
    assert [rule.hits for rule in rules] == [1, 1]
    assert place.holds(state)


@pytest.mark.parametrize("backend", always(["fsspec"], BACKENDS))
def test_multipart_uploads_outlive_transient_faults(
    server: EmbeddedS3, proxy: FaultProxy, backend: str
) -> None:
    place, state = Checkpoint(server, backend), make_state(3, mib=12)
    rules = [
        proxy.inject(Fault.status(503), method="PUT", path="partNumber=1&|partNumber=1$"),
        proxy.inject(Fault.reset_upload(1 << 20), method="PUT", path="partNumber=2"),
        proxy.inject(Fault.status(500), method="POST", path="uploads"),
        proxy.inject(Fault.status(503), method="POST", path="uploadId="),
    ]
    place.through(proxy).save(state)
    assert [rule.hits for rule in rules] == [1, 1, 1, 1]
    assert place.holds(state)


@pytest.mark.parametrize("backend", BACKENDS)
def test_credentials_that_expire_during_an_upload(
    server: EmbeddedS3, proxy: FaultProxy, backend: str
) -> None:
    """s3fs sends the part again; obstore has lost it, and the error says what to do."""
    place, state = Checkpoint(server, backend), make_state(15, mib=12)
    rule = proxy.inject(TRANSIENT["expired"], method="PUT", path="partNumber=2")
    if backend == "fsspec":
        place.through(proxy).save(state)
        assert place.holds(state)
    else:
        with pytest.raises(CheckpointException) as raised:
            place.through(proxy).save(state)
        text = str(cause_of(raised))
        assert re.search(r"rank 0 .*credentials expired.*expires_at.*'fsspec'", text)
        assert proxy.seen("DELETE", "uploadId=") and not proxy.seen("PUT", METADATA)
    assert rule.hits == 1


@pytest.mark.parametrize("backend", ["obstore", SLOW_FSSPEC])
def test_a_lost_answer_to_each_request_of_an_overwrite(
    server: EmbeddedS3, proxy: FaultProxy, backend: str
) -> None:
    """Whichever request took effect without its answer: the save is done, and all of it."""
    place, old, new = Checkpoint(server, backend), make_state(4), make_state(5)
    place.save(old)
    place.through(proxy).save(new, overwrite=True)
    count = len(proxy.seen())
    assert count >= 3
    for number in range(count):
        place.save(old, overwrite=True)
        proxy.clear()
        rule = proxy.inject(Fault.lose_answer(), skip=number)
        place.through(proxy).save(new, overwrite=True)
        assert rule.hits == 1
        assert place.holds(new), f"the answer to {rule.struck} was lost"


@pytest.mark.parametrize("backend", always(["fsspec"], BACKENDS))
def test_throttling_that_does_not_end_is_raised(
    server: EmbeddedS3, proxy: FaultProxy, backend: str
) -> None:
    """The error names the object, the rank, and the number of tries."""
    place, state = Checkpoint(server, backend), make_state(6)
    place.save(state)
    rule = proxy.inject(Fault.status(503), method="GET", path=DATA, times=-1)
    with pytest.raises(CheckpointException) as raised:
        place.through(proxy).load(state)
    cause = cause_of(raised)
    assert isinstance(cause, StorageError)
    object_name = unquote(proxy.seen("GET", DATA)[0].path).rpartition("/")[2].partition("?")[0]
    assert object_name in str(cause)
    assert "rank 0" in str(cause)
    assert f"{RETRY.tries} tries" in str(cause)
    assert rule.hits >= RETRY.tries


@pytest.mark.parametrize("backend", always(["obstore"], BACKENDS))
def test_a_save_that_is_throttled_for_ever_leaves_the_old_one(
    server: EmbeddedS3, proxy: FaultProxy, backend: str
) -> None:
    place, old, new = Checkpoint(server, backend), make_state(7), make_state(8)
    place.save(old)
    proxy.inject(Fault.status(503), method="PUT", path=DATA, times=-1)
    with pytest.raises(CheckpointException) as raised:
        place.through(proxy).save(new, overwrite=True)
    assert isinstance(cause_of(raised), StorageError)
    assert place.holds(old)
    assert latest(place.root, **place.store) == f"{place.root}/step-1"


@pytest.mark.parametrize("exclusive", [pytest.param(True, marks=pytest.mark.slow), False])
@pytest.mark.parametrize("backend", always(["fsspec"], BACKENDS))
def test_a_commit_of_unknown_outcome_never_loses_both(
    server: EmbeddedS3, proxy: FaultProxy, backend: str, exclusive: bool
) -> None:
    """The server takes the new ``.metadata``, the answer is lost, and every later try refused."""
    place, old, new = Checkpoint(server, backend), make_state(9), make_state(10)
    if not exclusive:
        place.save(old)
    committed = proxy.inject(Fault.lose_answer(), method="PUT", path=METADATA)
    proxy.inject(Fault.status(503), path=METADATA, times=-1, after=committed)
    with pytest.raises(CheckpointException):
        place.through(proxy).save(new, overwrite=not exclusive)
    assert committed.hits == 1
    assert place.holds(new)


@pytest.mark.each_value
@pytest.mark.parametrize("code", [403, 404])
@pytest.mark.parametrize("backend", BACKENDS)
def test_denied_and_missing_are_raised_at_once(
    server: EmbeddedS3, proxy: FaultProxy, backend: str, code: int
) -> None:
    place, state = Checkpoint(server, backend), make_state(11)
    place.save(state)
    rule = proxy.inject(Fault.status(code), path=DATA, times=-1)
    with pytest.raises(CheckpointException) as raised:
        place.through(proxy).load(state)
    per_range = [(each.method, each.range) for each in proxy.seen("", DATA)]
    assert len(per_range) == len(set(per_range)) == rule.hits
    cause = cause_of(raised)
    assert isinstance(cause, CorruptCheckpointError if code == 404 else StorageError)
    assert ".distcp" in str(cause) and "rank 0" in str(cause)


@pytest.mark.parametrize("backend", always(["obstore"], BACKENDS))
def test_a_denied_save_commits_nothing(server: EmbeddedS3, proxy: FaultProxy, backend: str) -> None:
    place = Checkpoint(server, backend)
    rule = proxy.inject(Fault.status(403), method="PUT", times=-1)
    with pytest.raises(CheckpointException) as raised:
        place.through(proxy).save(make_state(12))
    tried = [each.path for each in proxy.seen("PUT", "")]
    assert len(tried) == len(set(tried)) == rule.hits >= 1
    assert not proxy.seen("PUT", METADATA)
    assert latest(place.root, **place.store) is None
    text = "".join(traceback.format_exception(raised.value)) + str(cause_of(raised))
    assert server.secret_key not in text


@pytest.mark.each_value
@pytest.mark.parametrize("where", ["metadata", "data", "body"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_load_from_a_silent_server_ends(
    server: EmbeddedS3, proxy: FaultProxy, backend: str, where: str
) -> None:
    place, state = Checkpoint(server, backend), make_state(13)
    place.save(state)
    fault = Fault.stall(1000) if where == "body" else Fault.stall()
    proxy.inject(fault, path=METADATA if where == "metadata" else DATA, times=-1)
    begin = time.monotonic()
    with pytest.raises(CheckpointException) as raised:
        place.through(proxy).load(state, stall=STALL)
    assert time.monotonic() - begin < STALLED_WITHIN
    assert re.search(r"metadata|distcp|read", str(cause_of(raised)))


@pytest.mark.parametrize("backend", always(["obstore"], BACKENDS))
def test_a_save_to_a_silent_server_ends(
    server: EmbeddedS3, proxy: FaultProxy, backend: str
) -> None:
    place, old = Checkpoint(server, backend), make_state(14)
    place.save(old)
    proxy.inject(Fault.stall(), method="PUT", path=DATA, times=-1)
    begin = time.monotonic()
    with pytest.raises(CheckpointException):
        place.through(proxy).save(make_state(15), stall=STALL, overwrite=True)
    assert time.monotonic() - begin < SILENT_SAVE_WITHIN
    assert place.holds(old)


@pytest.fixture
def mute_port() -> Iterator[int]:
    """A server that accepts connections and neither reads nor writes."""
    listener = socket.create_server(("127.0.0.1", 0))
    kept: list[socket.socket] = []

    def accept() -> None:
        with pytest.raises(OSError):
            while True:
                kept.append(listener.accept()[0])

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(10)
    for each in kept:
        each.close()


@pytest.mark.parametrize(
    "backend, kind",
    [
        ("obstore", "load"),
        ("fsspec", "save"),
        pytest.param("obstore", "save", marks=pytest.mark.slow),
        pytest.param("fsspec", "load", marks=pytest.mark.slow),
    ],
)
def test_no_rank_hangs_on_a_mute_server(mute_port: int, backend: str, kind: str) -> None:
    """Every rank raises, and its process ends: no thread is left that keeps it alive."""
    s3 = S3Endpoint(f"http://127.0.0.1:{mute_port}")
    place = Checkpoint(s3, backend)
    with Crew(Task(kind, f"{place.root}/step-1", 1, place.store, kib=64, stall=STALL)) as crew:
        crew.go()
        outcomes = crew.outcomes(SURVIVORS_END_WITHIN)
    assert [outcome.report[0] for outcome in outcomes if outcome.report] == ["raised", "raised"]


class _RowsPlanner(dcp.DefaultLoadPlanner):
    """Asks for the rows of one rank of ``world``, as a load into another layout does."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        self.rank, self.world = rank, world

    def create_local_plan(self) -> LoadPlan:
        items = []
        for item in super().create_local_plan().items:
            if item.type is LoadItemType.TENSOR and len(item.lengths) == 2:
                rows = item.lengths[0]
                begin, end = (rows * r // self.world for r in (self.rank, self.rank + 1))
                offsets = torch.Size([begin, 0])
                lengths = torch.Size([end - begin, item.lengths[1]])
                items.append(
                    ReadItem(
                        type=item.type,
                        dest_index=item.dest_index,
                        dest_offsets=offsets,
                        storage_index=item.storage_index,
                        storage_offsets=offsets,
                        lengths=lengths,
                    )
                )
            else:
                items.append(item)
        return LoadPlan(items)


@pytest.mark.each_value
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_rank_reads_a_byte_twice(
    server: EmbeddedS3, proxy: FaultProxy, backend: str, world: int
) -> None:
    """By the ranges that really went over the wire."""
    place, state = Checkpoint(server, backend), make_state(16, mib=24)
    place.save(state)
    needed = read = 0
    for rank in range(world):
        proxy.clear()
        found = place.through(proxy).load(state, planner=_RowsPlanner(rank, world))
        spans: dict[str, list[tuple[int, int]]] = {}
        for request in proxy.seen("GET", DATA):
            first, last = re.findall(r"\d+", request.range or "")
            name = request.path.partition("?")[0]
            spans.setdefault(name, []).append((int(first), int(last) + 1))
        assert spans
        for name, ranges in spans.items():
            for (_, end), (start, _) in itertools.pairwise(sorted(ranges)):
                assert end <= start, f"rank {rank} read bytes {start}-{end} of {name} twice"
        read += sum(end - start for ranges in spans.values() for start, end in ranges)
        for key, tensor in state.items():
            part = found[key]
            if tensor.ndim == 2:
                begin, end = (len(tensor) * r // world for r in (rank, rank + 1))
                tensor, part = tensor[begin:end], part[begin:end]
            assert torch.equal(part, tensor)
            needed += tensor.nbytes
    assert needed <= read <= 1.02 * needed
