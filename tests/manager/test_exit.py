"""A process that ends while a save is under way leaves a checkpoint or none, and does end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.manager.exits import WAYS, state
from tests.manager.jobs import manager

_ROOT = Path(__file__).parents[2]


@pytest.mark.filterwarnings("ignore")  # DCP warns that there is no process group
def test_exits(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.manager.exits", str(tmp_path)],
        cwd=_ROOT,
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    outcomes = json.loads(done.stdout.splitlines()[-1])
    codes = {way: [code for code, _ in ranks] for way, ranks in outcomes.items()}
    assert codes == {
        "exit": [3, 3],
        "error": [1, 1],
        "one exits": [4, 3],
        "destroy": [4, 4],
        "destroy and stay": [4, 4],
        "close": [1, 1],
        "sigterm": [-15, -15],
    }, done.stderr[-3000:]
    for number, way in enumerate(WAYS):
        with manager(tmp_path / str(number) / "run") as alone:
            steps = alone.steps()
            # Who ends as usual ends the save first.
            assert (
                steps == [1, 2]
                if way in ("exit", "error", "one exits", "close")
                else (steps in ([1], [1, 2]))
            ), way
            found = {name: torch.zeros_like(value) for name, value in state(0).items()}
            assert alone.restore(found) == steps[-1]
            for name, value in state(steps[-1]).items():
                assert torch.equal(found[name], value)
    print(outcomes)
