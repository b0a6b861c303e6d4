"""One contract for every store."""

from __future__ import annotations

import os
import queue
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dcp_fsdp_osd.errors import StorageError, UnsafeCheckpointError
from dcp_fsdp_osd.storage import local_store
from dcp_fsdp_osd.storage.local_store import LocalStore, begin_writeback
from dcp_fsdp_osd.storage.obstore_store import ObstoreStore
from dcp_fsdp_osd.storage.opening import choose, open_store
from dcp_fsdp_osd.storage.redact import redact
from dcp_fsdp_osd.storage.store import Store, StoreConfig, check_name
from tests.storage.conftest import Place

PART = 5 << 20  # the smallest multipart part of S3


def upload(store: Store, name: str, data: bytes, part: int = PART) -> None:
    file = store.create(name, part, 2)
    for start in range(0, max(len(data), 1), part):
        piece = memoryview(data)[start : start + part]
        file.write(start, [piece[:7], piece[7:]])
    file.complete(len(data))


@pytest.mark.parametrize("size", [0, 1, 1000, PART, PART + 1, 2 * PART + 12345])
def test_write_and_read(place: Place, size: int) -> None:
    store = place.store()
    data = os.urandom(size)
    upload(store, "file", data)
    assert store.sizes() == {"file": size}
    assert store.size("file") == size
    assert store.read("file", size) == data
    a, b = size // 3, size // 2
    pieces = [bytearray(b - a), bytearray(0), bytearray(size - b)]
    seen = bytearray()
    store.read_into("file", a, [memoryview(piece) for piece in pieces], seen.extend)
    assert b"".join(pieces) == seen == data[a:]
    assert place.uploads() == []


def test_parts_in_parallel_and_any_order(place: Place) -> None:
    store = place.store()
    if store.limits.order in ("queue", "stream"):
        pytest.skip("writes of a file are in order here")
    data = os.urandom(3 * PART + 100)
    file = store.create("file", PART, 2)
    starts = list(range(0, len(data), PART))[::-1]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda at: file.write(at, [memoryview(data)[at : at + PART]]), starts))
    file.write(PART, [memoryview(data)[PART : 2 * PART]])  # a retry of a part
    file.complete(len(data))
    assert store.read("file", len(data)) == data


@pytest.mark.parametrize("last", [0, 12345])
def test_memory_is_free_again_on_return(place: Place, last: int) -> None:
    """Parts come from few buffers that are filled again, in many pieces now and then."""
    store = place.store()
    data = os.urandom(5 * PART + last)
    buffers: queue.SimpleQueue[bytearray] = queue.SimpleQueue()
    for _ in range(2):
        buffers.put(bytearray(PART))
    file = store.create("file", PART, 2)

    def write(start: int, buffer: bytearray) -> None:
        step = 10_000 if start == PART else PART // 3
        end = min(PART, len(data) - start)
        file.write(start, [memoryview(buffer)[i : min(i + step, end)] for i in range(0, end, step)])
        buffer[:] = b"x" * PART
        buffers.put(buffer)

    with ThreadPoolExecutor(1 if store.limits.order == "stream" else 2) as pool:
        done = []
        for start in range(0, len(data), PART):
            buffer = buffers.get()
            piece = data[start : start + PART]
            buffer[: len(piece)] = piece
            done.append(pool.submit(write, start, buffer))
        for each in done:
            each.result()
    file.complete(len(data))
    assert store.read("file", len(data)) == data


def test_abort_leaves_nothing(place: Place) -> None:
    store = place.store()
    file = store.create("file", PART, 2)
    file.write(0, [memoryview(bytes(PART))])
    file.write(PART, [memoryview(bytes(PART))])
    file.abort()
    del file
    assert store.sizes() == {}
    assert place.uploads() == []
    store.create("other", PART, 2).abort()
    assert store.sizes() == {}


def test_missing_and_short(place: Place) -> None:
    store = place.store()
    assert store.sizes() == {}
    assert store.commits() == [] and store.folders() == []
    for call in (
        lambda: store.size("none"),
        lambda: store.read("none", 10),
        lambda: store.read_into("none", 0, [memoryview(bytearray(5))]),
    ):
        with pytest.raises(FileNotFoundError):
            call()
    store.put("file", b"0123456789", exclusive=False)
    for start, size in ((5, 10), (10, 1), (100, 5)):
        with pytest.raises(EOFError):
            store.read_into("file", start, [memoryview(bytearray(size))])
    store.delete(["none", "file", "file"])
    assert store.sizes() == {}


def test_a_size_limit_holds_before_anything_is_read(place: Place) -> None:
    store = place.store()
    store.put("file", b"0123456789", exclusive=False)
    with pytest.raises(StorageError, match="10 bytes"):
        store.read("file", 9)


def test_put_replaces_in_one_step(place: Place) -> None:
    """A reader sees the old or the new bytes, never a mix or nothing."""
    store = place.store()
    old, new = b"a" * 100_000, b"b" * 120_000
    store.put("file", old, exclusive=False)
    stop = threading.Event()
    seen: list[bytes] = []

    def look() -> None:
        reader = place.store()
        while not stop.is_set():
            try:
                data = reader.read("file", 1 << 20)
            except EOFError:
                continue  # replaced by a shorter one between asking for its size and reading
            seen.append(data[:1] if data in (old, new, new[: len(old)]) else data)

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(look)
        for data in (new, old) * (3 if place.endpoint else 20):
            store.put("file", data, exclusive=False)
        stop.set()
        running.result()
    assert set(seen) <= {b"a", b"b"}


def test_listings_are_never_old(place: Place) -> None:
    store, other = place.store(), place.store()
    assert store.sizes() == {}
    other.put("file", b"1", exclusive=False)
    assert store.sizes() == {"file": 1}
    other.put("file", b"22", exclusive=False)
    assert store.sizes() == {"file": 2} and store.size("file") == 2
    other.delete(["file"])
    assert store.sizes() == {}


def test_folders_below_are_not_listed(place: Place) -> None:
    place.below("run").store().put(".metadata", b"x", exclusive=False)
    place.below("empty").store().put("data", b"x", exclusive=False)
    store = place.store()
    assert store.sizes() == {}
    assert [commit.folder for commit in store.commits()] == ["run"]
    assert sorted(store.folders()) == ["empty", "run"]
    assert store.commits()[0].modified >= 0


def test_in_a_forked_process_and_another_thread(place: Place) -> None:
    if place.kind == "memory":
        pytest.skip("memory is not shared with another process")
    session = place.reader()._session
    session.store.put("file", b"0123", exclusive=False)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: session.store.read("file", 10)).result() == b"0123"
    parent = session.store
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            fresh = session.store is not parent
            code = 0 if fresh and session.store.read("file", 10) == b"0123" else 2
        except StorageError as error:
            code = 3 if "forked" in str(error) else 4
        finally:
            os._exit(code)
    deadline = threading.Timer(30, os.kill, (pid, 9))
    deadline.start()
    _, status = os.waitpid(pid, 0)
    deadline.cancel()
    # obstore cannot be rebuilt there: an error, not a hang.
    assert os.waitstatus_to_exitcode(status) == (3 if place.kind == "obstore" else 0)
    assert session.store is parent and session.store.read("file", 10) == b"0123"


@pytest.mark.parametrize(
    "name",
    ["", "/etc/passwd", "../x", "a/../../x", "a//b", "./a", "~/x", "s3://b/x", "C:\\x", "C:/x",
     "a\\..\\b", "x\0", "x\n", "*", "a?", "a[b]", None, 5, b"x"],
)  # fmt: skip
def test_names_that_leave_the_folder(name: object) -> None:
    with pytest.raises(UnsafeCheckpointError):
        check_name(name)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "sub/x.distcp", "a b", "ä", "..x"])
def test_names_that_do_not(name: str) -> None:
    assert check_name(name) == name


def test_choice_of_backend() -> None:
    assert isinstance(open_store(StoreConfig("/tmp/x")), LocalStore)
    assert isinstance(open_store(StoreConfig("file:///tmp/x")), LocalStore)
    theirs = {"key": "a", "secret": "b"}
    ours = {"access_key_id": "a", "secret_access_key": "b", "region": "us-east-1"}

    def chosen(url: str, **options: object) -> str:
        return choose(StoreConfig(url, options=options)).backend

    assert chosen("s3://bucket/x", **theirs) == "obstore"
    assert chosen("s3://bucket/x", **theirs, client_kwargs={}) == "fsspec"
    assert chosen("s3://bucket/x", **ours) == "obstore"
    assert chosen("gs://bucket/x") == "obstore"
    assert chosen("memory://x") == "fsspec"
    assert isinstance(open_store(StoreConfig("s3://bucket/x", options=ours)), ObstoreStore)
    with pytest.raises(StorageError, match="unknown"):
        open_store(StoreConfig("/tmp/x", "nfs"))  # type: ignore[arg-type]
    with pytest.raises(StorageError, match="takes a path"):
        open_store(StoreConfig("s3://bucket/x", "local"))
    with pytest.raises(StorageError, match="cannot open"):
        open_store(StoreConfig("nosuchscheme://x"))
    with pytest.raises(StorageError, match="obstore"):
        open_store(StoreConfig("s3://bucket/x", "obstore", {"secret_access_keys": "hidden123"}))


def test_secrets_are_taken_out() -> None:
    options = {"key": "AKIA123", "secret": "very/secret", "client": {"token": "tok456"}, "n": 1}
    text = redact(
        "AKIA123 very/secret tok456 https://user:pw@host/ ?X-Amz-Signature=abc&x=1", options
    )
    for secret in ("AKIA123", "very/secret", "tok456", "user:pw", "abc"):
        assert secret not in text
    assert "very/secret" not in repr(StoreConfig("s3://b/x", options=options))


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux")
def test_the_kernel_is_asked_to_write(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb", buffering=0) as file:
        file.write(bytes(1 << 16))
        assert begin_writeback(file.fileno(), 0, 1 << 16)
        assert begin_writeback(file.fileno(), 1 << 12, 1 << 13)
        assert not begin_writeback(file.fileno(), -1, 1 << 12)
    end, other = os.pipe()
    try:
        assert not begin_writeback(other, 0, 1 << 12)
    finally:
        os.close(end)
        os.close(other)


@pytest.mark.parametrize("fsync", [True, False])
def test_each_part_is_on_its_way_to_the_disk_before_the_fsync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fsync: bool
) -> None:
    asked: list[tuple[int, int]] = []

    def seen(fd: int, offset: int, count: int) -> bool:
        assert os.fstat(fd).st_size >= offset + count
        asked.append((offset, count))
        return begin_writeback(fd, offset, count)

    monkeypatch.setattr(local_store, "begin_writeback", seen)
    store = LocalStore(StoreConfig(url=str(tmp_path), fsync=fsync))
    upload = store.create("file", 1 << 12, 1)
    upload.write(1 << 12, [memoryview(bytes(100))])
    upload.write(0, [memoryview(bytes(4000)), memoryview(bytes(96))])
    upload.complete((1 << 12) + 100)
    assert asked == ([(1 << 12, 100), (0, 1 << 12)] if fsync else [])
