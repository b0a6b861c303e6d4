"""Random models and wrappings, saved in one world and loaded in another, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.random_jobs import Job, draw, load, save
from tests.ranks import run_ranks


def _same(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        return one.dtype == two.dtype and torch.equal(one, two)
    if isinstance(one, torch.Tensor) or isinstance(two, torch.Tensor):
        return float(one) == float(two)  # a step counter
    return one == two


def _options(state: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Each parameter's options: how they are cut into groups is each job's own affair."""
    return {
        fqn: {name: value for name, value in group.items() if name != "params"}
        for group in state["param_groups"]
        for fqn in group["params"]
    }


def _differences(saved: dict[str, Any], loaded: dict[str, Any]) -> list[str]:
    found = []
    for fqn in sorted(saved["state"].keys() | loaded["state"].keys()):
        one, two = saved["state"].get(fqn, {}), loaded["state"].get(fqn, {})
        for name in sorted(one.keys() | two.keys()):
            if name not in one or name not in two or not _same(one[name], two[name]):
                found.append(f"{fqn}.{name}: {one.get(name)} became {two.get(name)}")
    if _options(saved) != _options(loaded):
        found.append(f"options {_options(saved)} became {_options(loaded)}")
    return found


def _check(seed: int, path: Path) -> Job:
    job = draw(seed)
    saved = run_ranks(save, job.source.world, job, str(path))
    loaded = run_ranks(load, job.target.world, job, str(path))
    for rank, state in enumerate([*saved[1:], *loaded]):
        assert not _differences(saved[0], state), (rank, job)
    return job


@pytest.mark.slow  # a few such jobs are rounds of the soak, which always run
@pytest.mark.parametrize("seed", range(12))
def test_random_job(tmp_path: Path, seed: int) -> None:
    _check(seed, tmp_path / "checkpoint")


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_many_random_jobs(tmp_path: Path, block: int) -> None:
    for seed in range(100 + 20 * block, 120 + 20 * block):
        _check(seed, tmp_path / str(seed))


def test_jobs_are_of_every_kind() -> None:
    jobs = [draw(seed) for seed in range(300)]
    assert {(job.source.by, job.target.by) for job in jobs} == {
        ("ours", "ours"),
        ("ours", "stock"),
        ("stock", "ours"),
    }
    sides = [side for job in jobs for side in (job.source, job.target)]
    assert len({(side.world, side.strategy, side.use_orig_params) for side in sides}) >= 20
    assert sum(not job.equal_groups and job.source.groups > 1 for job in jobs) >= 5
    assert any(job.source.world < job.target.world for job in jobs)
    assert any(job.source.world > job.target.world for job in jobs)


def test_differences_are_found() -> None:
    def state(value: float, decay: float) -> dict[str, Any]:
        return {
            "state": {"a": {"x": torch.tensor([value]), "step": 1.0}},
            "param_groups": [{"params": ["a"], "decay": decay}],
        }

    assert not _differences(state(1, 2), state(1, 2))
    assert _differences(state(1, 2), state(3, 2))
    assert _differences(state(1, 2), state(1, 3))
    assert _differences(state(1, 2), {**state(1, 2), "state": {}})
