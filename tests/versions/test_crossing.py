"""Checkpoints between torch versions: ``pytest tests/versions --other-python=PATH``.

Without the option they are this interpreter's own, which checks the check.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.versions.pins import constraints

ROOT = Path(__file__).parents[2]


def _run(python: str, action: str, folder: Path) -> dict[str, object]:
    command = [python, "-m", "tests.versions.crossing", action, str(folder)]
    done = subprocess.run(
        command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("reverse", [False, True], ids=["from here", "to here"])
def test_saved_by_one_and_loaded_by_the_other(
    tmp_path: Path, other_python: str, reverse: bool
) -> None:
    pair = [sys.executable, other_python]
    saver, loader = pair[::-1] if reverse else pair
    if reverse and saver == loader:
        pytest.skip("both are this interpreter: the other direction is the same")
    saved = _run(saver, "save", tmp_path / "c")
    loaded = _run(loader, "load", tmp_path / "c")
    print(f"saved by torch {saved['torch']}, loaded {loaded['loads']} times by {loaded['torch']}")
    assert loaded["loads"]


def test_constraints_for_another_torch() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    for torch in ("2.6.0", "2.15.0"):
        found = list(constraints(torch, lines))
        assert [line for line in found if line.startswith("torch==")] == [f"torch=={torch}"]
        assert "pytest==" in " ".join(found)
