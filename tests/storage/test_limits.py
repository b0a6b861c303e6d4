"""What takes long by right, and what belongs to somebody else."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_fsdp_osd.storage import StreamingReader, StreamingWriter, latest
from tests.storage.fakes import Script
from tests.storage.states import assert_same, load

pytestmark = pytest.mark.filterwarnings("ignore")  # DCP warns that there is no process group


def test_an_fsync_longer_than_the_limit_is_no_stall(tmp_path: Path) -> None:
    """It writes out what others wrote too, and says nothing meanwhile."""
    state = {"w": torch.arange(1000.0)}
    slept = []

    def before(operation: str, name: str) -> None:
        if operation == "complete":
            slept.append(name)
            time.sleep(0.9)

    path = str(tmp_path / "ck")
    writer = StreamingWriter(path, backend=Script(before=before).store, stall_seconds=0.3)
    dcp.save(dict(state), storage_writer=writer)
    assert slept
    assert_same(load(StreamingReader(path), state), state)


@pytest.mark.skipif(os.name != "posix" or os.getuid() != 0, reason="only root can be others")
def test_latest_beside_a_folder_of_another_user(tmp_path: Path) -> None:
    """What cannot be looked at is passed over, not the end of the search."""
    above = tmp_path
    while above != above.parent and above != Path("/tmp"):
        above.chmod(0o755)
        above = above.parent
    for name in ("step-1", "step-2"):
        dcp.save({"w": torch.ones(2)}, storage_writer=StreamingWriter(tmp_path / name))
    (tmp_path / "step-2").chmod(0o700)  # of root, and newer
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgid(65534)
            os.setuid(65534)
            answer = str(latest(tmp_path))
        except BaseException as error:
            answer = repr(error)
        os.write(send, answer.encode())
        os._exit(0)
    os.close(send)
    with os.fdopen(receive, "rb") as pipe:
        found = pipe.read().decode()
    os.waitpid(child, 0)
    assert found == str(tmp_path / "step-1")
    assert latest(tmp_path) == str(tmp_path / "step-2")
