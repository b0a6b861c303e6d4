"""Every mistake is told on all ranks, in a sentence that names it, within 30 seconds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.mistakes.case import SECONDS, Mistake, Outcome, all_mistakes, run_all
from tests.ranks import run_ranks
from tests.torch_gaps import HAS_STORE_CLONE


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Outcome]]:
    """What each rank was told of each mistake that this session asks for."""
    names = [
        item.callspec.params["mistake"].name  # type: ignore[attr-defined]
        for item in request.session.items
        if item.nodeid.startswith(request.node.nodeid) and hasattr(item, "callspec")
    ]
    root = Path(tmp_path_factory.mktemp("mistakes"))
    return run_ranks(run_all, 2, str(root), names, timeout=240)


@pytest.mark.parametrize("mistake", all_mistakes().values(), ids=lambda m: m.name)
def test_is_told(mistake: Mistake, outcomes: list[dict[str, Outcome]]) -> None:
    if mistake.name in ("load_without_rank_0", "verify_on_rank_0_alone") and not HAS_STORE_CLONE:
        pytest.skip(f"torch {torch.__version__} has no second connection to a FileStore")
    for rank, found in enumerate(outcomes):
        outcome = found[mistake.name]
        told = f"rank {rank} of {mistake.what!r} was told: {outcome.text or 'nothing'}"
        assert outcome.seconds < SECONDS, told
        if mistake.ranks is not None and rank not in mistake.ranks:
            continue
        assert (mistake.raises in outcome.types) if mistake.raises else not outcome.error, told
        assert re.search(mistake.says, outcome.text, re.DOTALL), told


def test_there_are_enough() -> None:
    assert len(all_mistakes()) >= 100
