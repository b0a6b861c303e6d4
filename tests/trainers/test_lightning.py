"""Lightning: fit, save, resume, by our strategies and its own, on CPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from benchmarks.s3_server import S3Endpoint, s3_server
from tests.ranks import run_ranks
from tests.torch_gaps import AVERAGES_ON_CPU, lacks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None, reason="lightning is not installed"
)


def _first(rank: int, world: int, folder: Path) -> dict[str, Any]:
    from tests.trainers import lightning_jobs

    return lightning_jobs.first(folder)


def _more(rank: int, world: int, folder: Path, s3: S3Endpoint) -> dict[str, Any]:
    from tests.trainers import lightning_jobs

    return lightning_jobs.more(folder, s3.url("run"), s3.storage_options)


def _second(rank: int, world: int, folder: Path) -> dict[str, Any]:
    from tests.trainers import lightning_jobs

    return lightning_jobs.second(folder)


def _resumed(rank: int, world: int, folder: Path) -> list[float]:
    from tests.trainers import lightning_jobs

    return lightning_jobs.resumed(folder)


def test_fsdp1_resumes_to_the_bit(tmp_path: Path) -> None:
    [found, other] = run_ranks(_first, 2, tmp_path, timeout=180)
    losses = found["ours"]
    assert len(set(losses)) == 6
    assert found["ours from ours"] == losses[3:]
    assert found["stock from ours"] == losses[3:]
    assert found["schedule"] == 6
    ours, stock = found["sent"]
    assert ours < 4096 < 60 * 301 * 4 < stock  # nothing but barriers; its whole weights at least
    for rank in (found, other):
        unpickled, missing, options, full, one_file = rank["errors"]
        assert "StorageError: saving" in unpickled and "rank 0 failed with" in unpickled
        assert "StorageError: loading" in missing and "no checkpoint at" in missing
        assert "writer_options" in options and "'full'" in full and "found False" in one_file
    assert not (tmp_path / "unsaved.ckpt").exists()
    [alone] = run_ranks(_resumed, 1, tmp_path)
    assert alone == pytest.approx(losses[3:], rel=1e-5) and alone != losses[3:]


@pytest.mark.slow
def test_from_its_own_from_s3_and_on_more_ranks(tmp_path: Path) -> None:
    with s3_server() as s3:
        [found, _] = run_ranks(_more, 2, tmp_path, s3, timeout=180)
    assert found["ours from stock"] == found["stock"][3:] == found["ours"][3:6]
    assert found["from disk"] == found["ours"][6:]
    assert found["from S3"] == found["further"] and len(found["further"]) == 2
    for three in run_ranks(_resumed, 3, tmp_path, timeout=180):
        assert three == pytest.approx(found["ours"][3:6], rel=1e-5)


@pytest.mark.slow
@lacks(not AVERAGES_ON_CPU, "FSDP2 on CPU (gloo sums gradients for their mean)")
def test_fsdp2_and_from_fsdp1(tmp_path: Path) -> None:
    [found, _] = run_ranks(_second, 2, tmp_path, timeout=180)
    losses = found["ours"]
    assert found["ours from ours"] == losses[3:] == found["stock from ours"]
    assert found["before"] == losses and found["from FSDP1"] == losses[3:]
