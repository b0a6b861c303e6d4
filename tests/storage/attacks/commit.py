"""What is saved: tensors that cannot be loaded, disks and terminals that fail, leftovers."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

import boto3
import torch
import torch.distributed.checkpoint as dcp
from fsspec import AbstractFileSystem
from torch.distributed.checkpoint import CheckpointException

from dcp_fsdp_osd.storage import StreamingReader, StreamingWriter, latest
from dcp_fsdp_osd.storage.fsspec_store import FsspecStore
from dcp_fsdp_osd.storage.transfer import RetryPolicy
from tests.storage.attacks.case import Attack, Gives, Refused
from tests.storage.conftest import Place
from tests.storage.states import load

STATE = {"weight": torch.arange(3000.0).view(10, 300), "lr": 0.5}


def saves(make: Any) -> Any:
    """An attack that saves what `make` makes as ``bad``, and loads it."""

    def attack(place: Place) -> Any:
        dcp.save({**STATE, "bad": make()}, storage_writer=place.writer())
        return load(place.reader(), {"bad": torch.ones(3)})["bad"]

    return attack


def freed() -> torch.Tensor:
    tensor = torch.ones(4, 100)
    tensor.untyped_storage().resize_(0)
    return tensor


def shrunk() -> torch.Tensor:
    tensor = torch.ones(4, 100)[1:, 3:]
    tensor.untyped_storage().resize_(1000)
    return tensor


def other_default_device(place: Place) -> Any:
    strided = {"strided": torch.arange(60_000.0).view(200, 300).t(), **STATE}
    with torch.device("meta"):
        dcp.save(dict(strided), storage_writer=place.writer())
    return load(place.reader(), strided)


def synced_folders(place: Place) -> Any:
    """Which of the folders that it made a save has synced the entries of."""
    synced: set[int] = set()
    real = os.fsync

    def spy(fd: int) -> None:
        synced.add(os.fstat(fd).st_ino)
        real(fd)

    path = Path(place.url) / "new" / "er" / "est"
    os.fsync = spy
    try:
        dcp.save(dict(STATE), storage_writer=StreamingWriter(path, fsync=True))
    finally:
        os.fsync = real
    made = (path, *path.parents)[:4]
    return [folder.stat().st_ino in synced for folder in made]


def odd_neighbours(place: Place) -> Any:
    root = Path(place.url)
    for name in ("step-2", "step-1²", "step-10"):
        dcp.save(dict(STATE), storage_writer=StreamingWriter(root / name))
        os.utime(root / name / ".metadata", (1e9, 1e9))
    (root / "loop").symlink_to(root / "loop")
    (root / "step-20" / ".metadata").mkdir(parents=True)
    (root / "step-30").write_text("")
    found = latest(root)
    return None if found is None else Path(found).name


def closed_terminal(place: Place) -> Any:
    before, sys.stderr = sys.stderr, open(os.devnull, "w")  # noqa: PTH123, SIM115
    sys.stderr.close()
    try:
        dcp.save(dict(STATE), storage_writer=place.writer(progress=True))
    finally:
        sys.stderr = before
    return load(place.reader(), STATE)


class InPlace(AbstractFileSystem):
    """Writes files where they lie, as sftp does, until the connection is lost."""

    protocol = "inplace"
    cachable = False

    def __init__(self, left: int, *, replaces: bool, **options: Any) -> None:
        super().__init__(**options)
        self.left, self.replaces = left, replaces

    def pipe_file(self, path: str, value: bytes, **_: Any) -> None:
        with Path(path).open("wb") as file:
            for byte in range(0, len(value), 64):
                self.alive(".metadata" in path)
                file.write(value[byte : byte + 64])
                file.flush()

    def alive(self, counted: bool) -> None:
        self.left -= counted
        if self.left < 0:
            raise ConnectionResetError("the connection is lost")

    def mv(self, path1: str, path2: str, **_: Any) -> None:
        self.alive(True)
        if not self.replaces and Path(path2).exists():
            raise FileExistsError(path2)
        Path(path1).replace(path2)

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        return Path(path).open(mode)

    def cat_file(self, path: str, start: Any = None, end: Any = None, **_: Any) -> bytes:
        return Path(path).read_bytes()[start:end]

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        Path(path).mkdir(parents=True, exist_ok=exist_ok)

    def info(self, path: str, **_: Any) -> Any:
        return {"name": path, "size": Path(path).stat().st_size, "type": "file"}

    def exists(self, path: str, **_: Any) -> bool:
        return Path(path).exists()

    def ls(self, path: str, detail: bool = True, **_: Any) -> Any:
        return [self.info(str(each)) for each in Path(path).iterdir()]

    def rm_file(self, path: str) -> None:
        Path(path).unlink()


def lost_connection(replaces: bool) -> Any:
    def attack(place: Place) -> Any:
        """The connection is lost at each step of the commit of an overwriting save in turn."""
        new = {"weight": STATE["weight"] + 1, "lr": 0.25}
        outcomes = set()
        for left in (0, 1, 5, 10, 11, 12, 13, 1000):
            path = f"{place.url}/{left}-{replaces}"
            dcp.save(dict(STATE), storage_writer=StreamingWriter(path))
            fs = InPlace(left, replaces=replaces)
            writer = StreamingWriter(
                path,
                overwrite=True,
                backend=lambda config, fs=fs: FsspecStore(fs, config.url),
                retry=RetryPolicy(tries=1),
            )
            try:
                dcp.save(dict(new), storage_writer=writer)
            except CheckpointException:
                fs.left = 1000
            found = load(StreamingReader(path), STATE)
            expected = STATE if found["lr"] == 0.5 else new
            assert torch.equal(found["weight"], expected["weight"])
            outcomes.add(found["lr"])
        return sorted(outcomes)

    return attack


def temporaries(place: Place) -> Any:
    """What a killed commit leaves goes with the next save."""
    store = FsspecStore(InPlace(1000, replaces=True), place.url)
    for _ in range(2):
        writer = StreamingWriter(place.url, overwrite=True, backend=lambda config: store)
        dcp.save(dict(STATE), storage_writer=writer)
        for number in range(2):
            (Path(place.url) / f".metadata.{number:032x}.tmp").write_text("half")
    dcp.save(dict(STATE), storage_writer=StreamingWriter(place.url, overwrite=True))
    return sorted(name.rpartition(".")[2] for name in os.listdir(place.url))  # noqa: PTH208


def left_upload(place: Place) -> Any:
    """A killed save's multipart upload, and one of somebody else's object."""
    assert place.endpoint is not None
    client = boto3.client("s3", **place.endpoint.boto3_options)
    prefix = place.url.partition("://")[2].partition("/")[2]
    mine = f"{prefix}/__0_0_{'0' * 32}.distcp"
    bucket = place.endpoint.bucket
    begun = [
        client.create_multipart_upload(Bucket=bucket, Key=key)
        for key in (mine, f"{prefix}/other", f"{prefix}/below/__0_0_{'0' * 32}.distcp")
    ]
    dcp.save(dict(STATE), storage_writer=place.writer())
    left = [key for key in place.uploads() if key.startswith(prefix)]
    for each in begun[1:]:
        client.abort_multipart_upload(Bucket=bucket, Key=each["Key"], UploadId=each["UploadId"])
    return mine in left, len(left)


def vanishing(place: Place) -> Any:
    """Files come and go while the folder is listed."""
    root = Path(place.url)
    root.mkdir(parents=True)
    over = threading.Event()

    def churn() -> None:
        while not over.is_set():
            for number in range(50):
                (root / f"{number}").touch()
            for number in range(50):
                (root / f"{number}").unlink()

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        store = place.store()
        for _ in range(300):
            store.sizes()
    finally:
        over.set()
        thread.join()


CASES = [
    Attack(
        "a tensor on the meta device",
        attack=saves(lambda: torch.empty(3, device="meta")),
        must=Refused("bad: .*meta device"),
    ),
    Attack(
        "a sparse tensor",
        attack=saves(lambda: torch.eye(3).to_sparse()),
        must=Refused("bad: .*sparse_coo"),
    ),
    Attack(
        "a sparse tensor in rows",
        attack=saves(lambda: torch.eye(3).to_sparse_csr()),
        # from torch 2.15 on by torch itself, which asks for its strides
        must=Refused("bad: .*sparse_csr|Sparse CSR tensors do not have strides", Exception),
        on=("local",),
    ),
    Attack("freed memory", attack=saves(freed), must=Refused("bad: .*memory was freed")),
    Attack("less memory", attack=saves(shrunk), must=Refused("bad: .*memory was freed")),
    Attack(
        "zeros without memory",
        attack=saves(lambda: torch._efficientzerotensor(3)),
        must=Gives(torch.zeros(3)),
    ),
    Attack(
        "another default device",
        attack=other_default_device,
        must=Gives({"strided": torch.arange(60_000.0).view(200, 300).t(), **STATE}),
    ),
    Attack("folders made", attack=synced_folders, must=Gives([True] * 4), on=("local",)),
    Attack("odd neighbours", attack=odd_neighbours, must=Gives("step-10"), on=("local",)),
    Attack("stderr is closed", attack=closed_terminal, must=Gives(STATE)),
    Attack(
        "the connection is lost, renaming replaces",
        attack=lost_connection(True),
        must=Gives([0.25, 0.5]),
        on=("local",),
    ),
    Attack(
        "the connection is lost, renaming does not replace",
        attack=lost_connection(False),
        must=Gives([0.25, 0.5]),
        on=("local",),
    ),
    Attack(
        "temporary files", attack=temporaries, must=Gives(["distcp", "metadata"]), on=("local",)
    ),
    Attack("a multipart left", attack=left_upload, must=Gives((False, 2)), on=("s3fs", "obstore")),
    Attack("files vanish", attack=vanishing, must=Gives(None), on=("local",)),
]
