"""accelerate: save_state and load_state with and without ours, on CPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.torch_gaps import AVERAGES_ON_CPU

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed"
)
VERSIONS = (1, 2) if AVERAGES_ON_CPU else (1,)


def _whole(rank: int, world: int, folder: Path) -> dict[Any, Any]:
    from tests.trainers import accelerate_jobs

    found: dict[Any, Any] = {n: accelerate_jobs.whole(n, folder) for n in VERSIONS}
    return {**found, "errors": accelerate_jobs.errors(folder)}


def _resumed(rank: int, world: int, folder: Path) -> dict[int, list[float]]:
    from tests.trainers import accelerate_jobs

    resume = accelerate_jobs.resume
    return {n: resume(n, folder / f"ours{n}", flat=True) for n in VERSIONS}


def test_save_state_and_load_state(tmp_path: Path) -> None:
    [found, other] = run_ranks(_whole, 2, tmp_path, timeout=180)
    [alone] = run_ranks(_resumed, 1, tmp_path)
    for version in VERSIONS:
        runs = found[version]
        losses = runs["losses"]
        assert len(set(losses)) == 6
        for way in ("ours from ours", "ours from stock"):
            assert runs[way] == losses[3:], way
        # Of FSDP1, accelerate 1.15 loads no state into an optimizer that has none yet.
        assert runs["stock from ours"] == runs["stock from stock"]
        assert runs["stock from ours"] == losses[3:] or version == 1
        assert runs["stock from ours"][0] == losses[3]  # the weights
        assert runs["merged"]  # by accelerate's own merge-weights, from our checkpoint
        assert runs["sent"] < 4096
        assert alone[version] == pytest.approx(losses[3:], rel=1e-5)
    assert found[1]["sent by stock"] > 60 * 301 * 4
    for rank in (found, other):
        full, missing, changed = rank["errors"]
        assert "SHARDED_STATE_DICT" in full and "FULL_STATE_DICT" in full
        assert "found none in accelerate 1." in missing and "docs/trainers/accelerate.md" in missing
        assert "found plugin, accelerator, everything in accelerate" in changed
    assert not (tmp_path / "full" / "pytorch_model_fsdp_0").exists()
