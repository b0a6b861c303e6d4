"""Against SeaweedFS, which checks signatures and checksums and has conditional PUTs.

What other tests show on servers that are lenient must hold on one that is not.
"""

from __future__ import annotations

import threading
import time
import traceback
from dataclasses import replace
from typing import Any

import boto3
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

from dcp_fsdp_osd.errors import StorageError
from dcp_fsdp_osd.storage import StreamingReader, StreamingWriter, latest
from dcp_fsdp_osd.storage.aws import list_uploads
from dcp_fsdp_osd.storage.transfer import RetryPolicy
from tests.breadth import always
from tests.servers import Fault, S3Endpoint, SeaweedS3, fault_proxy
from tests.storage.attacks.names import EXPECTED, odd_names
from tests.storage.conftest import Place
from tests.torch_gaps import stock_fsspec

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

BACKENDS = ["obstore", "fsspec"]
RETRY = RetryPolicy(tries=3, seconds=20.0, first=0.01, longest=0.1)
State = dict[str, torch.Tensor]


def store(s3: S3Endpoint, backend: str) -> dict[str, Any]:
    options = s3.obstore_options if backend == "obstore" else s3.storage_options
    return {"backend": backend, "storage_options": options}


def make_state(seed: int, rows: int = 500) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(rows, 1024, generator=generator),
        "bf16": torch.randn(64, 33, generator=generator).to(torch.bfloat16),
        "strided": torch.randn(50, 60, generator=generator).t(),
        **{f"step.{i}": torch.tensor(float(seed + i)) for i in range(20)},
    }


def save(s3: S3Endpoint, backend: str, url: str, state: State, **options: Any) -> None:
    writer = StreamingWriter(url, retry=RETRY, **store(s3, backend), **options)
    dcp.save(state, storage_writer=writer, no_dist=True)


def load(s3: S3Endpoint, backend: str, url: str, like: State) -> State:
    state = {key: torch.zeros_like(tensor) for key, tensor in like.items()}
    reader = StreamingReader(url, retry=RETRY, **store(s3, backend))
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def same(left: State, right: State) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def causes(raised: pytest.ExceptionInfo[CheckpointException]) -> list[BaseException]:
    return [failure[0] for failure in raised.value.failures.values()]


@pytest.mark.each_value
@pytest.mark.parametrize("rows", [500, 6000], ids=["small", "multipart"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_roundtrip_and_overwrite(weed: SeaweedS3, backend: str, rows: int) -> None:
    url = weed.url(f"roundtrip-{backend}-{rows}/step-1")
    old, new = make_state(1, rows), make_state(2, rows)
    save(weed, backend, url, old)
    assert same(load(weed, backend, url, old), old)
    other = BACKENDS[1 - BACKENDS.index(backend)]
    assert same(load(weed, other, url, old), old), "what one backend wrote, the other one reads"
    save(weed, backend, url, new, overwrite=True)
    assert same(load(weed, backend, url, new), new)
    keys = [
        entry["Key"]
        for entry in boto3.client("s3", **weed.boto3_options).list_objects_v2(
            Bucket=weed.bucket, Prefix=f"roundtrip-{backend}-{rows}/"
        )["Contents"]
    ]
    assert sum(key.endswith(".distcp") for key in keys) == len(keys) - 1, "the old files are gone"


@pytest.mark.parametrize("backend", BACKENDS)
def test_stock_reads_ours_and_we_read_stock(weed: SeaweedS3, backend: str) -> None:
    state = make_state(3)
    ours, stock = (weed.url(f"interop-{backend}/{name}") for name in ("ours", "stock"))
    save(weed, backend, ours, state)
    found = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    reader = stock_fsspec(FsspecReader, ours, **weed.storage_options)
    dcp.load(found, storage_reader=reader, no_dist=True)
    assert same(found, state)
    writer = stock_fsspec(FsspecWriter, stock, sync_files=False, **weed.storage_options)
    dcp.save(state, storage_writer=writer, no_dist=True)
    assert same(load(weed, backend, stock, state), state)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_existing_checkpoint_is_an_error(weed: SeaweedS3, backend: str) -> None:
    url, old = weed.url(f"exists-{backend}/step-1"), make_state(4)
    save(weed, backend, url, old)
    with pytest.raises(CheckpointException) as raised:
        save(weed, backend, url, make_state(5))
    assert all(isinstance(cause, StorageError) for cause in causes(raised))
    assert "overwrite=True" in str(causes(raised)[0])
    assert same(load(weed, backend, url, old), old)


@pytest.mark.parametrize("backend", BACKENDS)
def test_of_two_saves_at_once_one_wins(weed: SeaweedS3, backend: str) -> None:
    """Both find the place empty, and go to commit at the same time.

    The proxy holds back the notes by which they take turns until the other one was sent.
    """
    url, states = weed.url(f"race-{backend}/step-1"), [make_state(6), make_state(7)]
    failed: list[int] = []

    def run(number: int, s3: S3Endpoint) -> None:
        try:
            save(s3, backend, url, states[number])
        except CheckpointException:
            failed.append(number)

    with fault_proxy(weed) as proxy:
        held = proxy.inject(Fault.delay(1.0), method="PUT", path=r"\.committing(\?|$)", times=2)
        threads = [threading.Thread(target=run, args=(i, proxy.s3)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert held.hits == 2, "one of them did not come to its commit: no race"
    assert len(failed) == 1
    winner = states[1 - failed[0]]
    assert same(load(weed, backend, url, winner), winner)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_wrong_secret_is_raised_at_once_and_not_shown(weed: SeaweedS3, backend: str) -> None:
    url = weed.url(f"denied-{backend}/step-1")
    stranger = replace(weed, secret_key="not-the-right-one-at-all")
    begin = time.monotonic()
    with pytest.raises(CheckpointException) as raised:
        save(stranger, backend, url, make_state(8))
    assert time.monotonic() - begin < 5.0
    text = "".join(traceback.format_exception(raised.value)) + str(causes(raised)[0])
    assert stranger.secret_key not in text and weed.secret_key not in text
    assert latest(weed.url(f"denied-{backend}"), **store(weed, backend)) is None


@pytest.mark.parametrize("backend", always(["obstore"], BACKENDS))
def test_latest_is_the_newest_committed(weed: SeaweedS3, backend: str) -> None:
    root = weed.url(f"latest-{backend}")
    assert latest(root, **store(weed, backend)) is None
    for step in (9, 100, 20):
        save(weed, backend, f"{root}/step-{step}", make_state(step))
        time.sleep(1.1)  # S3 counts in seconds
    assert latest(root, **store(weed, backend)) == f"{root}/step-20"
    client = boto3.client("s3", **weed.boto3_options)
    client.delete_object(Bucket=weed.bucket, Key=f"latest-{backend}/step-20/.metadata")
    assert latest(root, **store(weed, backend)) == f"{root}/step-100"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_failed_save_leaves_no_uploads_and_no_objects(weed: SeaweedS3, backend: str) -> None:
    prefix = f"aborted-{backend}"
    with fault_proxy(weed) as proxy:
        struck = proxy.inject(Fault.status(403), method="PUT", path="partNumber=2", times=-1)
        with pytest.raises(CheckpointException):
            save(proxy.s3, backend, proxy.s3.url(f"{prefix}/step-1"), make_state(10, 9000))
        assert struck.hits >= 1
        assert proxy.seen("POST", "uploads"), "it was no multipart upload"
    client = boto3.client("s3", **weed.boto3_options)
    uploads = client.list_multipart_uploads(Bucket=weed.bucket, Prefix=prefix).get("Uploads", [])
    assert uploads == []
    assert "Contents" not in client.list_objects_v2(Bucket=weed.bucket, Prefix=prefix)


def test_more_uploads_than_one_answer_names_are_all_found(weed: SeaweedS3) -> None:
    client = boto3.client("s3", **weed.boto3_options)
    begun = set()
    for i in range(7):
        name = f"__{i % 3}_0.distcp"
        answer = client.create_multipart_upload(Bucket=weed.bucket, Key=f"many/{name}")
        begun.add((name, answer["UploadId"]))
    client.create_multipart_upload(Bucket=weed.bucket, Key="many/below/file")
    answers = []

    def two_at_a_time(method: str, **kwargs: Any) -> Any:
        answers.append(getattr(client, method)(Bucket=weed.bucket, MaxUploads=2, **kwargs))
        return answers[-1]

    found = list_uploads(two_at_a_time, "many/")
    assert set(found) == begun and len(found) == len(begun)
    assert len(answers) >= 4


@pytest.mark.parametrize("backend", always(["obstore"], BACKENDS))
def test_odd_names_are_signed_as_they_are_sent(weed: SeaweedS3, backend: str) -> None:
    options = store(weed, backend)["storage_options"]
    place = Place(backend, weed.url(f"odd-{backend}"), backend, options, weed)
    assert odd_names(place) == (EXPECTED, True)
