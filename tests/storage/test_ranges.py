"""From boxes to byte ranges: every wanted byte once, no byte twice, little waste."""

from __future__ import annotations

import itertools
import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from dcp_fsdp_osd.storage.ranges import Piece, Segment, box_runs, coalesce, segments


@st.composite
def boxes(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    sizes = draw(st.lists(st.integers(0, 6), max_size=4))
    offsets = [draw(st.integers(0, size)) for size in sizes]
    lengths = [draw(st.integers(0, size - o)) for size, o in zip(sizes, offsets, strict=True)]
    return sizes, offsets, lengths


@given(boxes(), st.sampled_from([1, 2, 8]))
def test_box_runs(box: tuple[list[int], list[int], list[int]], itemsize: int) -> None:
    sizes, offsets, lengths = box
    index = torch.arange(math.prod(sizes)).view(sizes)
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        index = index.narrow(dim, offset, length)
    expected = index.reshape(-1).tolist()
    runs = list(box_runs(sizes, offsets, lengths, itemsize))
    found = [i // itemsize for start, end in runs for i in range(start, end, itemsize)]
    assert found == expected
    # Runs are as long as can be, save for dimensions of length 1 next to whole ones.
    if index.is_contiguous() and expected and all(length > 1 for length in lengths):
        assert len(runs) == 1


pieces_of = st.lists(
    st.tuples(st.integers(0, 999), st.integers(1, 300)).map(
        lambda p: (p[0], min(p[0] + p[1], 1000))
    ),
    min_size=1,
    max_size=12,
)


@given(pieces_of, st.sampled_from([0, 16, 64]), st.sampled_from([64, 100, 1 << 20]))
def test_segments(spans: list[tuple[int, int]], block: int, limit: int) -> None:
    nbytes, origin = 1000, 5000
    pieces = [Piece(start, end, key, 0) for key, (start, end) in enumerate(spans)]
    found = segments(pieces, entry=3, origin=origin, nbytes=nbytes, block=block, limit=limit)
    for a, b in itertools.pairwise(found):
        assert a.end <= b.start
    for segment in found:
        assert segment.end - segment.start <= max(limit, block)
        if block:
            assert (segment.start - origin) % block == 0
            assert (segment.end - origin) % block == 0 or segment.end == origin + nbytes
        for piece in segment.pieces:
            assert segment.start - origin <= piece.start < piece.end <= segment.end - origin
    # Each consumer gets each of its bytes, once, in the right place.
    for key, (start, end) in enumerate(spans):
        parts = sorted((p.start, p.end, p.dest) for s in found for p in s.pieces if p.key == key)
        assert [p[0] for p in parts] == [start, *(p[1] for p in parts[:-1])]
        assert parts[-1][1] == end
        assert all(p[2] == p[0] - start for p in parts)
    if not block:
        covered = {i for start, end in spans for i in range(start, end)}
        assert sum(s.end - s.start for s in found) == len(covered)


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(0, 500), st.integers(1, 40)), max_size=30
    ),
    st.integers(0, 50),
    st.integers(30, 400),
)
def test_coalesce(spans: list[tuple[str, int, int]], gap: int, limit: int) -> None:
    wanted = []
    used: set[tuple[str, int]] = set()
    for name, start, size in spans:
        if not any((name, i) in used for i in range(start, start + size)):
            used |= {(name, i) for i in range(start, start + size)}
            wanted.append((name, Segment(start, start + size, 0, 0, ())))
    fetches = coalesce(wanted, gap=gap, limit=limit, waste=0.1)
    assert sorted((f.name, s.start) for f in fetches for s in f.segments) == sorted(
        (name, s.start) for name, s in wanted
    )
    for fetch in fetches:
        assert fetch.start == fetch.segments[0].start and fetch.end == fetch.segments[-1].end
        size = fetch.end - fetch.start
        assert size <= limit or len(fetch.segments) == 1
        lost = size - sum(s.end - s.start for s in fetch.segments)
        assert lost <= max(0.1 * size, gap)
        for a, b in itertools.pairwise(fetch.segments):
            assert 0 <= b.start - a.end <= gap
    for a, b in itertools.pairwise(fetches):
        assert a.name < b.name or (a.name == b.name and a.end <= b.start)
