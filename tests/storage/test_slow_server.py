"""A server that is slow and steady: what is limited is silence, not the length of a request."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_fsdp_osd.storage import StreamingReader, StreamingWriter
from tests.breadth import always
from tests.servers import s3_server
from tests.storage.states import assert_same, load

pytestmark = pytest.mark.filterwarnings("ignore")  # DCP warns that there is no process group


def _save_and_load(backend: str, count: int, rate: float, stall: float) -> None:
    state = {f"w{i}": torch.arange(count, dtype=torch.float32) + i for i in range(4)}
    with s3_server(bandwidth=rate, memory=2 << 30) as s3:
        options = s3.obstore_options if backend == "obstore" else s3.storage_options
        where = {"backend": backend, "storage_options": options, "stall_seconds": stall}
        writer = StreamingWriter(s3.url("slow"), **where)
        dcp.save(dict(state), storage_writer=writer)
        assert_same(load(StreamingReader(s3.url("slow"), **where), state), state)
        assert s3.stats()["bytes_in"] < 1.1 * writer.stats.bytes  # nothing was sent twice


@pytest.mark.parametrize("backend", always(["obstore"], ["fsspec", "obstore"]))
def test_a_request_may_take_longer_than_the_limit(backend: str) -> None:
    """20 MiB, all parts at once: 4.2 s, 2.1 times the limit.  With the default of 60 s this is as
    slow as 170 kB/s.
    """
    _save_and_load(backend, 5 << 18, 5e6, 2.0)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["fsspec", "obstore"])
def test_5_mb_a_second(backend: str) -> None:
    _save_and_load(backend, 9_000_000, 5e6, 60.0)  # 144 MB, with the default limit
