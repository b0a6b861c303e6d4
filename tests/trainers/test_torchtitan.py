"""torchtitan's CheckpointManager with our reader and writer, as docs/trainers/torchtitan.md has it.

Its pins (``datasets<4.8``, so an older fsspec) exclude those of the tests, so that it is not among
what ``make test`` installs; ``pip install --no-deps torchtitan torch_checkpointing torchdata
spmd_types tyro einops typeguard docstring_parser`` is enough for this.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not installed"
)


def _whole(rank: int, world: int, folder: Path) -> dict[str, Any]:
    from tests.trainers import torchtitan_jobs

    return torchtitan_jobs.whole(folder)


def test_each_manager_resumes_from_each_ones_checkpoints(tmp_path: Path) -> None:
    found, other = run_ranks(_whole, 2, tmp_path, timeout=180)
    assert found == other
    losses = found.pop("losses")
    assert len(set(losses)) == 6
    assert len(found) == 6
    for way, resumed in found.items():
        assert resumed == losses[3:], way
    written = {path.name.split("_")[-1] for path in tmp_path.glob("ours*/step-3/*.distcp")}
    assert written and all(len(name) > 30 for name in written)  # ours names files by their save
