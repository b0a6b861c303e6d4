"""Faults, stalls, memory limits and progress: on stores that do as the test says."""

from __future__ import annotations

import logging
import pickle
import sys
import threading
import time
from pathlib import Path
from typing import Any

import botocore.exceptions
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter
from torch.distributed.checkpoint.planner import LoadPlan

from dcp_fsdp_osd.errors import StorageError
from dcp_fsdp_osd.storage import StreamingReader, StreamingWriter
from dcp_fsdp_osd.storage.level import Level
from dcp_fsdp_osd.storage.local_store import LocalStore
from dcp_fsdp_osd.storage.progress import Progress
from dcp_fsdp_osd.storage.session import make_session
from dcp_fsdp_osd.storage.store import StoreConfig
from dcp_fsdp_osd.storage.transfer import Budget, Deadline, Pool, RetryPolicy, Stats
from tests.storage.conftest import Place
from tests.storage.fakes import Script, fail_first, hang
from tests.storage.states import BoxPlanner, assert_same, load

pytestmark = pytest.mark.filterwarnings("ignore")  # DCP warns that there is no process group

QUICK = RetryPolicy(tries=4, seconds=5, first=0.001, longest=0.01)
STATE = {"a": torch.arange(300_000.0), "b": torch.arange(200_000), "c": torch.tensor(1.0), "d": 5}


def save(path: Path, script: Script, **arguments: Any) -> StreamingWriter:
    writer = StreamingWriter(
        path, backend=script.store, part_size=1 << 18, fsync=False, retry=QUICK, **arguments
    )
    dcp.save(dict(STATE), storage_writer=writer)
    return writer


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save(tmp_path / "c", Script())
    return tmp_path / "c"


# ---- retries ----


@pytest.mark.parametrize("operation", ["list", "create", "write", "complete", "put"])
def test_transient_errors_of_a_save_are_retried(tmp_path: Path, operation: str) -> None:
    script = Script(before=fail_first(operation, 3, ConnectionResetError))
    writer = save(tmp_path / "c", script)
    assert writer.stats.retries == 3
    assert_same(load(StreamingReader(tmp_path / "c"), STATE), STATE)


@pytest.mark.parametrize("operation", ["read", "write"])
def test_the_retry_budget_ends(tmp_path: Path, saved: Path, operation: str) -> None:
    script = Script(before=fail_first(operation, 10**6, lambda: ConnectionResetError("by peer")))
    with pytest.raises(CheckpointException, match=r"gave up after 4 tries.*by peer") as error:
        if operation == "write":
            save(tmp_path / "d", script)
        else:
            load(StreamingReader(saved, backend=script.store, retry=QUICK), STATE)
    assert "rank 0" in str(error.value)


def test_retries_end_by_time_too(saved: Path) -> None:
    policy = RetryPolicy(tries=10**6, seconds=0.3, first=0.01, longest=0.05)
    script = Script(before=fail_first("read", 10**6, ConnectionResetError))
    begin = time.monotonic()
    with pytest.raises(CheckpointException, match="gave up"):
        load(StreamingReader(saved, backend=script.store, retry=policy), STATE)
    assert time.monotonic() - begin < 3


def test_permanent_errors_are_raised_at_once(saved: Path) -> None:
    script = Script(before=fail_first("read", 10**6, lambda: PermissionError("no access")))
    reader = StreamingReader(saved, backend=script.store, retry=QUICK)
    with pytest.raises(CheckpointException, match="gave up after 1 try: PermissionError"):
        load(reader, STATE)
    assert reader.stats.retries == 0


def s3_error(code: str, status: int) -> OSError:
    """As s3fs raises it: translated, with botocore's as the cause."""
    response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    error = OSError(5, code)
    error.__cause__ = botocore.exceptions.ClientError(response, "GetObject")
    return error


def test_which_s3_errors_are_transient(make_place: Any) -> None:
    store = make_place("s3fs").store()
    for code, status in (("SlowDown", 503), ("InternalError", 500), ("503", 503), ("x", 502)):
        assert store.is_transient(s3_error(code, status)), code
    for code, status in (("AccessDenied", 403), ("NoSuchKey", 404), ("InvalidRequest", 400)):
        assert not store.is_transient(s3_error(code, status)), code
    assert store.is_transient(s3_error("ExpiredToken", 400))
    for error in (
        botocore.exceptions.EndpointConnectionError(endpoint_url="http://x"),
        botocore.exceptions.ReadTimeoutError(endpoint_url="http://x"),
        TimeoutError(),
        ConnectionResetError(),
    ):
        assert store.is_transient(error), error
    assert not store.is_transient(ValueError())


def test_which_obstore_errors_are_transient(make_place: Any) -> None:
    store = make_place("obstore").store()
    generic = store.obs.exceptions.GenericError
    for text in (
        "Server returned non-2xx status code: 503 Slow Down",
        "Server returned non-2xx status code: 500",
        "HTTP error: error sending request",
        "operation timed out",
    ):
        assert store.is_transient(generic(text)), text
    for text in ("Server returned non-2xx status code: 400 Bad Request", "unknown key"):
        assert not store.is_transient(generic(text)), text
    assert not store.is_transient(store.obs.exceptions.PermissionDeniedError("403"))


@pytest.mark.parametrize("kind", ["s3fs", "obstore"])
def test_no_secret_in_errors(make_place: Any, kind: str) -> None:
    place: Place = make_place(kind)
    key = "secret" if kind == "s3fs" else "secret_access_key"
    endpoint = "endpoint_url" if kind == "s3fs" else "endpoint"
    options = {**place.options, key: "s3cr3tvalue", endpoint: "http://127.0.0.1:9"}
    reader = StreamingReader(
        place.url, backend=place.backend, storage_options=options, retry=QUICK, stall_seconds=6
    )
    with pytest.raises(CheckpointException) as error:
        load(reader, STATE)
    assert "s3cr3tvalue" not in str(error.value) + repr(error.value) + repr(reader._session)
    assert "gave up after" in str(error.value)


# ---- errors on their way to other ranks ----


class LockedError(FileExistsError):
    """Cannot be pickled; as a FileExistsError it passes the retries as it is."""

    def __init__(self) -> None:
        super().__init__("locked")
        self.lock = threading.Lock()


class TwoPartError(FileExistsError):
    """Can be pickled, and not unpickled."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} {two}")


def odd_error(kind: str) -> BaseException:
    class LocalError(BaseException):
        pass

    class MuteError(FileExistsError):
        def __str__(self) -> str:
            raise RuntimeError("no text")

        def __reduce__(self) -> Any:
            raise RuntimeError("no pickle")

    makers: dict[str, Any] = {
        "LockedError": LockedError,
        "TwoPartError": lambda: TwoPartError("locked", "twice"),
        "LocalError": lambda: LocalError("locked"),
        "MuteError": MuteError,
    }
    error: BaseException = makers[kind]()
    return error


@pytest.mark.parametrize("kind", ["LockedError", "TwoPartError", "LocalError", "MuteError"])
@pytest.mark.parametrize("operation", ["list", "create", "write", "complete", "read", "read whole"])
def test_every_error_can_be_sent_to_other_ranks(
    tmp_path: Path, saved: Path, operation: str, kind: str
) -> None:
    script = Script(before=fail_first(operation, 1, lambda: odd_error(kind)))
    with pytest.raises(CheckpointException) as error:
        if operation.startswith("read"):
            load(StreamingReader(saved, backend=script.store, retry=QUICK), STATE)
        else:
            save(tmp_path / "d", script)
    (failure,) = pickle.loads(pickle.dumps(error.value)).failures.values()
    text = str(failure[0])
    if operation == "read whole" and not isinstance(failure[0], StorageError):
        # Of an error there, DCP keeps the text alone (since torch 2.7).
        assert isinstance(failure[0], AssertionError) and "metadata read failed" in text
    else:
        assert type(failure[0]) is StorageError and "rank 0" in text and kind in text
    assert ("cannot be shown" if kind == "MuteError" else "locked") in text


@pytest.mark.parametrize("error", [KeyboardInterrupt(), StorageError("x"), OSError(28, "full")])
def test_errors_that_can_be_sent_stay_as_they_are(error: BaseException) -> None:
    assert make_session(None).portable(error) is error


def test_a_planner_s_error_too(saved: Path) -> None:
    class Planner(BoxPlanner):
        def resolve_tensor(self, read_item: Any) -> torch.Tensor:
            raise LockedError

    planner = Planner("a", [((0,), (1000,))])
    with pytest.raises(CheckpointException, match="LockedError: locked"):
        dcp.load({}, storage_reader=StreamingReader(saved), planner=planner)
    assert [type(error) for error in planner.errors] == [StorageError]


# ---- errors of workers and stalls ----


def test_the_first_error_cancels_the_rest(tmp_path: Path) -> None:
    script = Script(before=fail_first("write", 1, lambda: OSError(28, "disk full")))
    state = {f"t{i}": torch.zeros(1 << 16) for i in range(64)}
    writer = StreamingWriter(
        tmp_path / "c", backend=script.store, part_size=1 << 18, concurrency=2, fsync=False
    )
    with pytest.raises(CheckpointException, match="disk full"):
        dcp.save(state, storage_writer=writer)
    assert script.count("write") < 16
    assert script.count("complete") == 0
    assert not list((tmp_path / "c").iterdir())


def test_no_threads_are_left(saved: Path) -> None:
    before = threading.active_count()
    script = Script(before=fail_first("read", 1, lambda: OSError(5, "bad sector")))
    for _ in range(3):
        with pytest.raises(CheckpointException):
            load(StreamingReader(saved, backend=script.store), STATE)
        script.before = fail_first("read", 1, lambda: OSError(5, "bad sector"))
    assert threading.active_count() <= before


@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_stall_has_a_time_limit(tmp_path: Path, saved: Path, operation: str) -> None:
    script = Script(before=hang(operation, 8.0))
    begin = time.monotonic()
    with pytest.raises(CheckpointException, match="nothing was transferred for 0 s"):
        if operation == "write":
            save(tmp_path / "d", script, stall_seconds=0.2)
        else:
            load(StreamingReader(saved, backend=script.store, stall_seconds=0.2), STATE)
    assert time.monotonic() - begin < 7


def test_a_write_that_was_left_behind_finds_no_other_file(tmp_path: Path) -> None:
    """A thread wakes up after the save was given up, when its file's number is another file's."""
    store = LocalStore(StoreConfig(str(tmp_path)))
    upload = store.create("a", 1, 1)
    upload.write(0, [memoryview(b"one")])
    upload.abort()
    other = store.create("b", 1, 1)
    with pytest.raises(StorageError, match="over"):
        upload.write(0, [memoryview(b"two")])
    other.write(0, [memoryview(b"three")])
    other.complete(5)
    assert (tmp_path / "b").read_bytes() == b"three"


def test_the_planner_hears_of_a_failed_read_at_once(saved: Path) -> None:
    def before(operation: str, name: str) -> None:
        if name.endswith(".distcp"):
            raise OSError(5, "bad sector")

    script = Script(before=before)
    planner = BoxPlanner("a", [((0,), (1000,))])
    with pytest.raises(CheckpointException, match="bad sector"):
        dcp.load({}, storage_reader=StreamingReader(saved, backend=script.store), planner=planner)
    assert len(planner.errors) == 1 and not planner.committed


@pytest.mark.parametrize(
    ("url", "shown", "remote"),
    [
        ("{folder}", "{folder}", False),
        ("file://{folder}", "file://{folder}", False),
        ("s3://me:s3cr3t@bucket/c", "s3://***@bucket/c", True),
    ],
)
def test_what_a_reader_tells_planners(tmp_path: Path, url: str, shown: str, remote: bool) -> None:
    reader = StreamingReader(url.format(folder=tmp_path))
    plan = reader.prepare_local_plan(LoadPlan([], storage_data="somebody's", planner_data="kept"))
    assert pickle.loads(pickle.dumps(plan.storage_data)) == {
        "dcp_fsdp_osd": {
            "reads_parts": True,
            "reports_errors": True,
            "url": shown.format(folder=tmp_path),
            "remote": remote,
            "save": None,
        }
    }
    assert plan.planner_data == "kept"


class LazyPlanner(BoxPlanner):
    """Counts the items that are resolved and not committed."""

    def __init__(self, fqn: str, boxes: list[tuple[Any, Any]]) -> None:
        super().__init__(fqn, boxes, lambda shape: torch.zeros(shape, dtype=torch.int32))
        self.open = self.most = 0

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        self.open += 1
        self.most = max(self.most, self.open)
        return super().resolve_tensor(read_item)

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        self.open -= 1
        super().commit_tensor(read_item, tensor)


@pytest.mark.parametrize("verify", [True, False])
def test_destinations_are_asked_for_when_they_are_needed(tmp_path: Path, verify: bool) -> None:
    """A planner may lend out memory that it uses again, even for the parts of one large entry."""
    path, count, size = tmp_path / "c", 24, 1 << 19
    whole = torch.arange(count * size, dtype=torch.int32)
    dcp.save({"t": whole}, storage_writer=StreamingWriter(path, fsync=False))
    planner = LazyPlanner("t", [((i * size,), (size,)) for i in range(count)])
    reader = StreamingReader(path, concurrency=1, verify=verify)
    dcp.load({}, storage_reader=reader, planner=planner)
    # Four parts of 2 MiB make one request; two requests wait or run, one is being prepared.
    assert planner.most <= 12 and sorted(planner.committed) == list(range(count))
    assert all(abs(number - turn) <= 12 for turn, number in enumerate(planner.committed))
    assert torch.equal(torch.cat(planner.found), whole)


def test_a_pool_reports_the_first_error_and_stops() -> None:
    def fail() -> None:
        raise OSError("first")

    stats = Stats()
    with (
        pytest.raises(OSError, match="first"),
        Pool(Level(2), stall=5, what="x", stats=stats) as pool,
    ):
        pool.submit(fail)
        for _ in range(50):
            pool.submit(lambda: time.sleep(0.01))
        pool.drain()
    assert pool.stopped()


# ---- memory ----


LARGE = {
    "plain": torch.arange(3 << 20, dtype=torch.float32),
    "strided": torch.arange(3 << 20, dtype=torch.float32).view(3, -1).t(),
    "tail": torch.arange(100_001, dtype=torch.int16).view(-1, 1).expand(-1, 3),
}


@pytest.mark.parametrize("copies", [0, 1, 2])
@pytest.mark.parametrize("limit", [1 << 20, 4 << 20, 16 << 20])
def test_a_save_stays_within_its_memory(tmp_path: Path, copies: int, limit: int) -> None:
    script = Script(before=hang("write", 0.002), limits={"write_copies": copies})
    writer = StreamingWriter(
        tmp_path / "c", backend=script.store, max_inflight_bytes=limit, concurrency=4, fsync=False
    )
    dcp.save(dict(LARGE), storage_writer=writer)
    assert 0 < writer.stats.peak_inflight <= limit
    if copies:
        assert script.most * copies <= limit
    assert_same(load(StreamingReader(tmp_path / "c"), LARGE), LARGE)


@pytest.mark.parametrize("copies", [0, 1, 2])
@pytest.mark.parametrize("stock", [True, False])
@pytest.mark.parametrize("direct", [True, False])
def test_a_load_stays_within_its_memory(
    tmp_path: Path, copies: int, stock: bool, direct: bool
) -> None:
    writer: Any = FileSystemWriter if stock else StreamingWriter
    state = {key: value.contiguous() for key, value in LARGE.items()}
    dcp.save(dict(state), storage_writer=writer(tmp_path / "c"))
    script = Script(before=hang("read", 0.002), limits={"read_copies": copies})
    limit = 4 << 20
    reader = StreamingReader(
        tmp_path / "c", backend=script.store, max_inflight_bytes=limit, concurrency=4
    )
    found = {
        key: torch.zeros(value.shape, dtype=value.dtype if direct else torch.float64)
        for key, value in state.items()
    }
    dcp.load(found, storage_reader=reader)
    for key, value in state.items():
        assert torch.equal(found[key], value.to(found[key].dtype))
    assert reader.stats.peak_inflight <= limit
    if copies:
        assert script.most * copies <= limit
    if direct and not copies:
        assert reader.stats.peak_inflight < 64 << 10


def test_many_small_runs_stay_within_the_memory(tmp_path: Path) -> None:
    """One byte of each row, into another dtype: nothing lands where it belongs."""
    tensor = torch.arange(5 << 20, dtype=torch.int64).to(torch.int8).view(-1, 512)
    dcp.save({"t": tensor}, storage_writer=StreamingWriter(tmp_path / "c"))
    boxes = [((0, column), (len(tensor), 1)) for column in (3, 40)]
    planner = BoxPlanner("t", boxes, lambda lengths: torch.zeros(lengths, dtype=torch.int16))
    reader = StreamingReader(tmp_path / "c", max_inflight_bytes=4 << 20)
    dcp.load({}, storage_reader=reader, planner=planner)
    for (_, column), found in zip((box[0] for box in boxes), planner.found, strict=True):
        assert torch.equal(found[:, 0], tensor[:, column].to(torch.int16))
    assert reader.stats.peak_inflight <= 4 << 20


def test_requests_are_fewer_where_gaps_may_be_longer(tmp_path: Path) -> None:
    """Every other tensor of a file, the last of which is larger than a request."""
    torch.manual_seed(1)
    state = {f"t{n:02}": torch.rand(30_000) for n in range(40)}
    state["t40"] = torch.rand(3 << 20)
    dcp.save(dict(state), storage_writer=StreamingWriter(tmp_path / "c"))
    wanted = {
        name: tensor for number, (name, tensor) in enumerate(state.items()) if number % 2 == 0
    }
    requests = {}
    for gap in (None, 1 << 17, 4 << 20):
        found = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
        limit = 8 << 20
        reader = StreamingReader(tmp_path / "c", max_gap_bytes=gap, max_inflight_bytes=limit)
        dcp.load(found, storage_reader=reader)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        assert reader.stats.peak_inflight <= limit
        requests[gap] = reader.stats.requests
    assert requests[None] >= 20 > requests[1 << 17] > requests[4 << 20] < 8
    with pytest.raises(ValueError, match="positive"):
        StreamingReader(tmp_path / "c", max_gap_bytes=0)


def test_limits_that_cannot_be_kept(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="4 MiB"):
        StreamingReader(tmp_path, max_inflight_bytes=1000)
    for arguments in ({"part_size": 0}, {"concurrency": 0}, {"max_inflight_bytes": -1}):
        with pytest.raises(ValueError, match="positive"):
            StreamingWriter(tmp_path, **arguments)  # type: ignore[arg-type]
    script = Script(limits={"min_part": 5 << 20, "write_copies": 1})
    with pytest.raises(CheckpointException, match="too small"):
        save(tmp_path / "c", script, max_inflight_bytes=1 << 20)
    with pytest.raises(CheckpointException, match="no path or URL"):
        dcp.save({}, storage_writer=StreamingWriter())


def test_parts_grow_where_their_number_is_bounded(tmp_path: Path) -> None:
    script = Script(limits={"max_parts": 20})
    writer = StreamingWriter(tmp_path / "c", backend=script.store, part_size=1024, fsync=False)
    dcp.save({"t": torch.arange(100_000)}, storage_writer=writer)
    assert script.count("write") <= 20


def test_a_budget() -> None:
    stats = Stats()
    budget = Budget(100, stats)
    assert budget.try_acquire(60) and not budget.try_acquire(50) and budget.try_acquire(40)
    budget.release(100)
    assert budget.try_acquire(500)  # what cannot be cut, alone
    assert not budget.try_acquire(1)
    assert stats.peak_inflight == 500


# ---- progress and stats ----


def test_progress_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="dcp_fsdp_osd"):
        writer = StreamingWriter(tmp_path / "c", progress=True)
        dcp.save(dict(STATE), storage_writer=writer)
        load(StreamingReader(tmp_path / "c", progress=True), STATE)
    lines = [record.getMessage() for record in caplog.records if "MB/s" in record.getMessage()]
    assert len(lines) == 2 and lines[0].startswith("save") and lines[1].startswith("load")
    assert all(": 100 %, " in line and line.endswith(" 0 s left") for line in lines)


def test_progress_says_where_its_lines_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="dcp_fsdp_osd"):
        dcp.save(dict(STATE), storage_writer=StreamingWriter(tmp_path / "c", progress=True))
    (line,) = [record.getMessage() for record in caplog.records]
    assert "logging.basicConfig(level=logging.INFO)" in line
    assert "'dcp_fsdp_osd.storage.progress'" in line


def test_progress_ends_with_100_percent_unless_it_failed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="dcp_fsdp_osd"):
        with Progress("save", 100, rank=1, enabled=True) as bar:
            bar.add(120)  # more than was planned
        with pytest.raises(OSError), Progress("save", 100, rank=1, enabled=True) as bar:
            bar.add(100)
            raise OSError
    first, second = (record.getMessage() for record in caplog.records)
    assert ": 100 %, " in first and ": 99 %, " in second


def test_a_bar_on_rank_0_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with Progress("save", 100, rank=0, enabled=True) as bar:
        bar.add(60)
        assert bar._bar is not None and bar._bar.n == 60
        shown = bar._bar
    assert (shown.n, shown.total) == (60, 60)
    with Progress("save", 100, rank=1, enabled=True) as bar:
        assert bar._bar is None
    with Progress("save", 100, rank=0, enabled=False) as bar:
        assert bar._bar is None


def test_stats(tmp_path: Path) -> None:
    writer = save(tmp_path / "c", Script())
    assert set(writer.stats.seconds) == {"prepare", "write", "metadata", "commit"}
    assert (
        writer.stats.bytes
        >= writer.stats.needed
        >= sum(t.nbytes for t in STATE.values() if isinstance(t, torch.Tensor))
    )
    reader = StreamingReader(tmp_path / "c")
    load(reader, STATE)
    assert set(reader.stats.seconds) == {"metadata", "read"}
    assert pickle.loads(pickle.dumps(reader.stats)) == reader.stats


def test_a_session_opens_nothing_before_use(tmp_path: Path) -> None:
    opened = []
    session = make_session(
        tmp_path,
        backend=lambda config: opened.append(config) or LocalStore(config),  # type: ignore[func-returns-value]
    )
    assert not opened
    assert session.store is session.store and len(opened) == 1
    session.close()
    assert session.store and len(opened) == 2


def test_a_failure_to_open_is_a_storage_error(tmp_path: Path) -> None:
    session = make_session("nosuchscheme://x")
    with pytest.raises(StorageError, match="fsspec cannot open"):
        _ = session.store


def test_a_deadline_ends_the_wait_for_a_task() -> None:
    begin = time.monotonic()
    hangs = threading.Event()
    with (
        pytest.raises(StorageError, match="x: the deadline is over"),
        Pool(Level(1), stall=60, what="x", stats=Stats(), deadline=Deadline(0.2)) as pool,
    ):
        pool.submit(lambda: hangs.wait(20))
        pool.drain()
    assert 0.15 < time.monotonic() - begin < 5
    hangs.set()
    with Pool(Level(1), stall=0.2, what="x", stats=Stats(), deadline=Deadline(60)) as pool:
        pool.submit(lambda: 5)
        assert pool.drain() == [5]
        pool.submit(lambda: hangs.wait(0.1))
        pool.drain()
    with (
        pytest.raises(StorageError, match="nothing was transferred for 0 s"),
        Pool(Level(1), stall=0.2, what="x", stats=Stats(), deadline=Deadline(60)) as pool,
    ):
        pool.submit(lambda: time.sleep(1))
        pool.drain()


def test_deadlines() -> None:
    assert Deadline(None).left() is None
    Deadline(None).check("x")
    Deadline(60).check("x")
    left = Deadline(60).left()
    assert left is not None and 50 < left <= 60
    assert Deadline(0).left() == 0


@pytest.mark.parametrize("operation", ["create", "write", "complete", "put"])
def test_a_save_that_is_late_is_given_up(tmp_path: Path, operation: str) -> None:
    def before(name: str, _: str) -> None:
        if name == operation:
            time.sleep(0.5)

    begin = time.monotonic()
    with pytest.raises(CheckpointException, match="the deadline is over"):
        save(tmp_path / "c", Script(before=before), deadline=0.3)
    assert time.monotonic() - begin < 10
    deadline = time.monotonic() + 5
    while list((tmp_path / "c").iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)  # what hung has ended
    assert not list((tmp_path / "c").iterdir())
    save(tmp_path / "c", Script(), deadline=60)
