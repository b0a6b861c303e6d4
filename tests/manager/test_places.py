"""Object storage, and fast local storage with object storage behind it."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from dcp_fsdp_osd.storage.session import make_session
from tests.breadth import always
from tests.manager.jobs import Run, damage, digest, manager, raised
from tests.ranks import run_ranks
from tests.servers import EmbeddedS3, s3_server
from tests.storage.fakes import Script

pytestmark = pytest.mark.filterwarnings("ignore")  # DCP warns that there is no process group


@pytest.fixture(scope="module")
def s3() -> Iterator[EmbeddedS3]:
    with s3_server() as server:
        yield server


def _names(path: str | Path) -> list[str]:
    return sorted(name.name for name in Path(path).iterdir())


def _in_bucket(rank: int, world: int, url: str, options: dict[str, Any]) -> None:
    with manager(
        url, keep_last=2, storage_options=options["storage_options"], **options["more"]
    ) as saving:
        run = Run(seed=1)
        assert run.restored(saving) is None
        for _ in range(4):
            run.train()
            saving.save(run.step, run.state())
        assert saving.save(4, run.state(), wait=True).result() == f"{url}/step-4"
        saving.wait()
        dist.barrier()  # the first rank has removed what is not kept
        assert saving.steps() == [3, 4]
        other = Run(seed=2)
        assert other.restored(saving) == 4 and digest(other) == digest(run)


@pytest.mark.parametrize("backend", always(["obstore"], ["fsspec", "obstore"]))
def test_object_storage(s3: EmbeddedS3, backend: str) -> None:
    if backend == "obstore":
        pytest.importorskip("obstore")
    url = s3.url(f"manager-{backend}")
    own = {key: s3.storage_options[key] for key in ("key", "secret", "endpoint_url")}
    own["region"] = "us-east-1"
    debris = make_session(f"{url}/step-1", backend=backend, storage_options=own)
    debris.store.put("__0_0_killed.distcp", b"x", exclusive=False)
    options = {"storage_options": own, "more": {"backend": backend}}
    run_ranks(_in_bucket, 2, url, options)
    run_ranks(_in_bucket_again, 2, url, options)
    above = make_session(url, backend=backend, storage_options=own)
    assert sorted(above.store.folders()) == ["step-4", "step-5"]


def _in_bucket_again(rank: int, world: int, url: str, options: dict[str, Any]) -> None:
    with manager(
        url, keep_last=2, storage_options=options["storage_options"], **options["more"]
    ) as saving:
        run = Run(seed=3)
        assert run.restored(saving) == 4
        saving.save(5, run.state())


def _two_places(rank: int, world: int, near: str, far: str) -> list[int]:
    digests = []
    with manager(far, local=near, keep_last=3) as saving:
        run = Run(seed=1)
        assert run.restored(saving) is None
        for _ in range(5):
            run.train()
            future = saving.save(run.step, run.state())
            digests.append(digest(run))
        assert future.result(30) == f"{near}/step-5"
        saving.wait()
        dist.barrier()  # the first rank has removed what is not kept
        assert saving.steps() == [3, 4, 5]
        assert f"local={near!r}" in repr(saving)
    dist.barrier()
    assert _names(near) == ["step-5"] and _names(far) == ["step-3", "step-4", "step-5"]
    return digests


def _restored(rank: int, world: int, near: str, far: str) -> tuple[int | None, int]:
    with manager(far, local=near, keep_last=3) as saving:
        run = Run(seed=7)
        return run.restored(saving), digest(run)


def test_local_first(tmp_path: Path) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    saved = run_ranks(_two_places, 2, str(near), str(far))

    def check(step: int) -> None:
        found = run_ranks(_restored, 2, str(near), str(far))
        assert found == [(step, saved[rank][step - 1]) for rank in range(2)]

    kept = tmp_path / "kept"
    shutil.copytree(near, kept)
    shutil.rmtree(far / "step-5")
    check(5)  # the near one is enough
    shutil.copytree(kept / "step-5", far / "step-5")
    damage(near / "step-5", "flip")
    check(5)  # the far copy of it
    damage(far / "step-5", "missing")
    check(4)
    shutil.rmtree(near)
    check(4)
    # Copied byte for byte, metadata included.
    shutil.copytree(kept, near)
    shutil.rmtree(far)
    assert run_ranks(_goes_on, 2, str(near), str(far)) == [5, 5]
    for name in (kept / "step-5").iterdir():
        assert (far / "step-5" / name.name).read_bytes() == name.read_bytes()
    assert _names(far / "step-5") == _names(kept / "step-5")


def _goes_on(rank: int, world: int, near: str, far: str) -> int | None:
    """Step 5 was not copied when the job was killed; it is, when step 6 is."""
    with manager(far, local=near, keep_last=3) as saving:
        run = Run(seed=7)
        found = run.restored(saving)
        run.train()
        saving.save(6, run.state())
        saving.wait()
        dist.barrier()  # the first rank has removed what is not kept
        assert saving.steps() == [5, 6]
        return found


def _copy_fails(rank: int, world: int, near: str, far: str) -> list[str]:
    fail = threading.Event()

    def before(operation: str, name: str) -> None:
        if operation == "write" and rank == 1 and fail.is_set():
            raise OSError(28, "quota exceeded")

    told = []
    with manager(far, local=near, backend=Script(before=before).store) as saving:
        run = Run().train()
        saving.save(1, run.state(), wait=True)
        saving.wait()
        fail.set()
        saving.save(2, run.state(), wait=True)
        while not saving._saver.idle:
            time.sleep(0.05)
        dist.barrier()
        told.append(raised(lambda: saving.save(3, run.state())))
        dist.barrier()
        assert _names(near) == ["step-1", "step-2"] and _names(far) == ["step-1"]
        saving.save(3, run.state())
        told.append(raised(saving.wait))
        dist.barrier()
        fail.clear()
        saving.save(4, run.state())
        saving.save(4, run.train().state())  # not while the first is on its way up
        saving.wait()
        expected = digest(run)
        dist.barrier()
        if rank == 0:
            shutil.rmtree(f"{near}/step-4")
        dist.barrier()
        other = Run(seed=5)
        assert other.restored(saving) == 4 and digest(other) == expected
        saving.save(4, run.state(), wait=True)
        saving.wait()
    dist.barrier()
    assert _names(near) == ["step-4"] and _names(far) == ["step-2", "step-3", "step-4"]
    return told


def test_a_copy_that_fails_is_told_and_made_later(tmp_path: Path) -> None:
    for rank, told in enumerate(
        run_ranks(_copy_fails, 2, str(tmp_path / "n"), str(tmp_path / "f"))
    ):
        for text in told:
            assert "quota exceeded" in text, (rank, text)


def _to_bucket(rank: int, world: int, near: str, far: str, options: dict[str, Any]) -> None:
    with manager(far, local=near, local_keep=2, storage_options=options) as saving:
        run = Run().train()
        saving.save(1, run.state(), wait=True).result()
        saving.wait()
        if rank == 0:  # another copy of it is killed on its way
            above = make_session(f"{far}/step-1", storage_options=options)
            for name in Path(f"{near}/step-1").glob("*.distcp"):
                above.store.create(name.name, 5 << 20, 1).write(0, [memoryview(bytes(5 << 20))])
            assert len(above.store.uploads()) >= 2
            above.store.delete([".metadata"])
        dist.barrier()
        run.train()
        saving.save(2, run.state())
        saving.wait()
        dist.barrier()
        if rank == 0:
            assert above.store.uploads() == [] and ".metadata" in above.store.sizes()
        expected = digest(run)
        dist.barrier()
        if rank == 0:
            shutil.rmtree(near)
        dist.barrier()
        other = Run(seed=5)
        assert other.restored(saving) == 2 and digest(other) == expected


def test_local_first_then_object_storage(s3: EmbeddedS3, tmp_path: Path) -> None:
    run_ranks(_to_bucket, 2, str(tmp_path / "near"), s3.url("copied"), s3.storage_options)


def _no_bucket(rank: int, world: int, url: str, options: dict[str, Any]) -> list[str]:
    with manager(url, storage_options=options) as saving:
        told = [raised(lambda: saving.restore({"x": 1}))]
        told.append(raised(lambda: saving.save(1, {"x": 1}, wait=True)))
        return told


def test_a_bucket_that_does_not_exist(s3: EmbeddedS3) -> None:
    for rank, told in enumerate(
        run_ranks(_no_bucket, 2, "s3://no-such-bucket/run", s3.storage_options)
    ):
        for text in told:
            assert "no-such-bucket" in text and "does not exist" in text, (rank, text)
