"""Rows that FSDP2 and tensor parallelism leave to a rank, dealt out one by one; no processes."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from dcp_fsdp_osd.layout.placements import wrong_rows


def _chunk(rows: torch.Tensor, count: int, number: int) -> torch.Tensor:
    """Of ``torch.chunk``, which gives fewer where rows run out."""
    chunks = rows.chunk(count)
    return chunks[number] if number < len(chunks) else rows[:0]


def _said(size: int, cuts: list[tuple[int, int]], at: tuple[int, ...]) -> torch.Tensor:
    """What torch takes a rank's rows for: each cut deals what is left out, in turns."""
    rows = torch.arange(size)
    for (ranks, turns), n in zip(cuts, at, strict=True):
        rows = torch.cat([_chunk(_chunk(rows, turns, t), ranks, n) for t in range(turns)])
    return rows


def _held(size: int, cuts: list[tuple[int, int]], at: tuple[int, ...], plain: int) -> torch.Tensor:
    """What FSDP2 has: plain cuts come first, then those to the right before those to the left."""
    rows = torch.arange(size)
    for d in [*range(plain), *reversed(range(plain, len(cuts)))]:
        rows = _chunk(rows, cuts[d][0], at[d])
    return rows


def _expected(size: int, cuts: list[tuple[int, int]]) -> str:
    """``""``, ``"box"`` or ``"rows"``: what is wrong with some rank's rows."""
    plain = next((d for d, (_, turns) in enumerate(cuts) if turns > 1), len(cuts))
    after = [math.prod(ranks for ranks, _ in cuts[d + 1 :]) for d in range(len(cuts))]
    nested = all(cuts[d][1] == after[d] for d in range(plain, len(cuts)))
    if plain == len(cuts):
        return ""
    for at in itertools.product(*(range(ranks) for ranks, _ in cuts)):
        said = _said(size, cuts, at)
        if nested and not torch.equal(said, _held(size, cuts, at, plain)):
            return "rows"
        if len(said) and not torch.equal(said, torch.arange(int(said[0]), int(said[-1]) + 1)):
            return "rows" if nested else "box"
    return ""


@settings(max_examples=400, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.sampled_from(["shard", "strided", "other", "whole"])),
        min_size=1,
        max_size=3,
    ),
    st.lists(st.integers(1, 4), min_size=3, max_size=3),
    st.integers(0, 13),
)
def test_wrong_rows(dims: list[tuple[int, str]], turns: list[int], size: int) -> None:
    kinds: dict[str, Any] = {
        "shard": lambda _: Shard(1),
        "strided": lambda turns: _StridedShard(1, split_factor=turns),
        "other": lambda _: Shard(0),
        "whole": lambda _: Replicate(),
    }
    placements: list[Placement] = []
    cuts = []
    for (ranks, kind), each in zip(dims, turns, strict=False):
        placements.append(kinds[kind](each))
        if kind in ("shard", "strided"):
            cuts.append((ranks, each if kind == "strided" else 1))
    found = wrong_rows("w", [ranks for ranks, _ in dims], placements, (5, size))
    expected = _expected(size, cuts)
    if not expected:
        assert found == ""
    elif expected == "box":
        assert found.startswith("w: expected each rank to hold one box") and "dimension 1" in found
    else:
        assert found.startswith("w: expected FSDP2 to hold the rows")
        assert f"size of that dimension, now {size}, that" in found


def test_the_rows_in_question_are_named() -> None:
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    assert wrong_rows("w", (3, 2), placements, (6,)) == ""
    uneven = wrong_rows("w", (3, 2), placements, (7,))
    assert "some rank holds rows none of dimension 0, which torch takes for rows [6:7]" in uneven
    alone = wrong_rows("w", (2,), placements[:1], (8,))
    assert alone.endswith("give some rank rows [0:2] and [4:6] of dimension 0")
