"""From boxes to byte ranges: every wanted byte once, no byte twice, little waste."""

from __future__ import annotations

import itertools
import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from dcp_fsdp_osd.storage.ranges import FileRange, Span, box_spans, coalesce, file_ranges


@st.composite
def boxes(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    sizes = draw(st.lists(st.integers(0, 6), max_size=4))
    offsets = [draw(st.integers(0, size)) for size in sizes]
    lengths = [draw(st.integers(0, size - o)) for size, o in zip(sizes, offsets, strict=True)]
    return sizes, offsets, lengths


@given(boxes(), st.sampled_from([1, 2, 8]))
def test_box_spans(box: tuple[list[int], list[int], list[int]], itemsize: int) -> None:
    sizes, offsets, lengths = box
    index = torch.arange(math.prod(sizes)).view(sizes)
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        index = index.narrow(dim, offset, length)
    expected = index.reshape(-1).tolist()
    runs = list(box_spans(sizes, offsets, lengths, itemsize, key=7, near_bytes=0))
    found = [i // itemsize for run in runs for i in range(run.start, run.end, itemsize)]
    assert found == expected
    assert [run.dest for run in runs] == list(
        itertools.accumulate((run.end - run.start for run in runs[:-1]), initial=0)
    )[: len(runs)]
    # Runs are as long as can be, save for dimensions of length 1 next to whole ones.
    if index.is_contiguous() and expected and all(length > 1 for length in lengths):
        assert len(runs) == 1


@given(boxes(), st.sampled_from([1, 2, 8]), st.integers(1, 100))
def test_few_spans(box: tuple[list[int], list[int], list[int]], itemsize: int, near: int) -> None:
    sizes, offsets, lengths = box
    runs = list(box_spans(sizes, offsets, lengths, itemsize, key=7, near_bytes=0))
    spans = list(box_spans(sizes, offsets, lengths, itemsize, key=7, near_bytes=near))
    assert len(spans) <= 1 + math.prod(sizes) * itemsize // near
    for a, b in itertools.pairwise(spans):
        assert a.end <= b.start and b.start - a.start >= near
    inside = [run for span in spans for run in runs if span.start <= run.start < span.end]
    assert inside == runs
    for span in spans:
        held = [run for run in runs if span.start <= run.start < span.end]
        assert (span.start, span.end) == (held[0].start, held[-1].end)
        assert span.dest is None if len(held) > 1 else span == held[0]


extents_of = st.lists(
    st.tuples(st.integers(0, 999), st.integers(1, 300)).map(
        lambda p: (p[0], min(p[0] + p[1], 1000))
    ),
    min_size=1,
    max_size=12,
)


def check_cover(found: list[FileRange], extents: list[tuple[int, int]]) -> None:
    """Each consumer gets each of its bytes, once, in the right place."""
    for a, b in itertools.pairwise(found):
        assert a.end <= b.start
    for file_range in found:
        for span in file_range.spans:
            assert (
                file_range.start - file_range.origin
                <= span.start
                < span.end
                <= file_range.end - file_range.origin
            )
    for key, (start, end) in enumerate(extents):
        parts = sorted((p.start, p.end, p.dest) for s in found for p in s.spans if p.key == key)
        assert [p[0] for p in parts] == [start, *(p[1] for p in parts[:-1])]
        assert parts[-1][1] == end
        assert all(p[2] == p[0] - start for p in parts)


@given(extents_of, st.sampled_from([0, 16, 64]))
def test_file_ranges(extents: list[tuple[int, int]], block: int) -> None:
    nbytes, origin = 1000, 5000
    spans = [Span(start, end, key, 0) for key, (start, end) in enumerate(extents)]
    found = file_ranges(spans, entry=3, origin=origin, nbytes=nbytes, block=block, grain=4)
    check_cover(found, extents)
    for a, b in itertools.pairwise(found):
        assert a.end < b.start, "one range would do"
    for file_range in found:
        if block:
            assert (file_range.start - origin) % block == 0
            assert (file_range.end - origin) % block == 0 or file_range.end == origin + nbytes
    if not block:
        covered = {i for start, end in extents for i in range(start, end)}
        assert sum(s.end - s.start for s in found) == len(covered)


@given(extents_of, st.sampled_from([0, 16, 64]), st.integers(0, 300), st.integers(40, 400))
def test_file_ranges_are_cut_to_requests(
    extents: list[tuple[int, int]], block: int, before: int, limit: int
) -> None:
    """Behind a header of some size; the parts still give each consumer all of its bytes."""
    spans = [Span(start, end, key, 0) for key, (start, end) in enumerate(extents)]
    found = file_ranges(spans, entry=3, origin=5000, nbytes=1000, block=block, grain=4)
    header = FileRange(5000 - before, 5000, 3, -1, ()) if before else None
    wanted = [("f", file_range) for file_range in ([header] if header else []) + found]
    fetches = coalesce(wanted, max_gap_bytes=10, max_bytes=limit)
    parts = [part for fetch in fetches for part in fetch.ranges]
    if header:
        assert parts[0] == header
    check_cover([part for part in parts if part != header], extents)
    most, grain = limit + limit // 16, block or 4
    for fetch in fetches:
        assert fetch.end - fetch.start <= most + grain or len(fetch.ranges) == 1
    for a, b in itertools.pairwise(parts):
        assert a.end <= b.start
        if block:
            assert (b.start - 5000) % block == 0


@given(
    st.lists(
        st.tuples(
            st.sampled_from("ab"), st.integers(0, 500), st.integers(1, 90), st.sampled_from([0, 4])
        ),
        max_size=30,
    ),
    st.integers(0, 50),
    st.integers(30, 400),
)
def test_coalesce(extents: list[tuple[str, int, int, int]], gap: int, limit: int) -> None:
    wanted = []
    used: set[tuple[str, int]] = set()
    for name, start, size, grain in extents:
        if not any((name, i) in used for i in range(start, start + size)):
            used |= {(name, i) for i in range(start, start + size)}
            wanted.append((name, FileRange(start, start + size, 0, 0, (), grain)))
    fetches = coalesce(wanted, max_gap_bytes=gap, max_bytes=limit, max_waste=0.1)
    read = [(f.name, i) for f in fetches for s in f.ranges for i in range(s.start, s.end)]
    assert sorted(read) == sorted(used)
    most = limit + limit // 16
    for fetch in fetches:
        assert fetch.start == fetch.ranges[0].start and fetch.end == fetch.ranges[-1].end
        size = fetch.end - fetch.start
        assert size <= most or (len(fetch.ranges) == 1 and fetch.ranges[0].grain == 0)
        lost = size - sum(s.end - s.start for s in fetch.ranges)
        assert lost <= max(0.1 * size, gap)
        for a, b in itertools.pairwise(fetch.ranges):
            assert 0 <= b.start - a.end <= gap
    for a, b in itertools.pairwise(fetches):
        assert a.name < b.name or (a.name == b.name and a.end <= b.start)


def test_what_touches_is_read_in_full_requests() -> None:
    """Entries of all sizes one after the other: no request for a header or trailer alone."""
    wanted, position = [], 0
    for number, size in enumerate([20_000, 100, 100, 8_000, 9_000, 33_000, 50, 7_900, 16_000]):
        for length, grain in ((70, 0), (size, 16), (90, 0)):
            wanted.append(("f", FileRange(position, position + length, number, 0, (), grain)))
            position += length
    fetches = coalesce(wanted, max_gap_bytes=0, max_bytes=8_000)
    assert sum(fetch.end - fetch.start for fetch in fetches) == position
    assert len(fetches) <= -(-position // 8_000) + 1


def test_gaps_of_a_request_add_up() -> None:
    """Each is allowed; together they are more than may be thrown away."""
    wanted = [("f", FileRange(at, at + 100, 0, 0, (), 0)) for at in range(0, 660, 110)]
    fetches = coalesce(wanted, max_gap_bytes=10, max_bytes=10_000)
    assert [(fetch.start, fetch.end) for fetch in fetches] == [(0, 210), (220, 430), (440, 650)]
    (fetch,) = coalesce(wanted, max_gap_bytes=10, max_bytes=10_000, max_waste=0.1)
    assert (fetch.start, fetch.end) == (0, 650)


def test_where_a_range_may_be_cut() -> None:
    """At blocks of the checksum where there are any, else at multiples of the grain."""
    for block, cut in ((64, 64), (0, 4)):
        (found,) = file_ranges(
            [Span(70, 90, 0, 0)], entry=0, origin=0, nbytes=1000, block=block, grain=4
        )
        assert found.grain == cut
