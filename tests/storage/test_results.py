"""What travels from each rank to the coordinator after a write: all of it, and little."""

from __future__ import annotations

import pickle

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import MetadataIndex

from dcp_fsdp_osd.storage.metadata import KIND_BYTES, KIND_OPAQUE, KIND_TENSOR, EntryInfo
from dcp_fsdp_osd.storage.places import WrittenPlaces
from dcp_fsdp_osd.storage.results import Entry, pack_results, unpack_results

COUNTS = st.integers(0, 1 << 62)
CRC = st.none() | st.integers(0, (1 << 32) - 1)
INDICES = st.builds(
    MetadataIndex,
    st.text(),
    st.none() | st.lists(COUNTS, max_size=4).map(torch.Size),
    st.none() | st.integers(0, 1 << 40),
)
_OTHERS = st.sampled_from([KIND_BYTES, KIND_OPAQUE])
INFOS = st.one_of(
    st.tuples(st.text(), COUNTS, COUNTS, _OTHERS, CRC),
    st.tuples(st.text(), COUNTS, COUNTS, st.just(KIND_TENSOR), CRC, COUNTS, COUNTS, st.text()),
).map(lambda values: EntryInfo(*values))


def _last_of_each(entries: list[Entry]) -> list[object]:
    """What a dict of them holds, with the hints, which indices leave out of comparisons."""
    found = dict(entries)
    return [(index.fqn, index.offset, index.index, info) for index, info in found.items()]


@given(st.lists(st.lists(st.tuples(INDICES, INFOS), max_size=5), max_size=4))
def test_all_of_it_arrives_and_the_last_of_a_place_counts(of_ranks: list[list[Entry]]) -> None:
    sent = [pickle.loads(pickle.dumps(pack_results(each, "crc32c"))) for each in of_ranks]
    written, used = unpack_results(sent)
    entries = [entry for of_rank in of_ranks for entry in of_rank]
    expected = _last_of_each(entries)
    for places in (written, WrittenPlaces(entries)):
        assert list(places.rows()) == expected
        assert {type(offset) for _, offset, _, _ in places.rows()} <= {torch.Size, type(None)}
        assert all(type(info) is EntryInfo for *_, info in places.rows())
        assert [(index.fqn, index.offset, index.index) for index in places] == [
            row[:3] for row in places.rows()
        ]
        assert len(places) == len(expected) and all(index in places for index, _ in entries)
        assert all(places.entry(index) == info for index, info in dict(entries).items())
        ends: dict[str, int] = {}
        for _, info in entries:  # files of those that were replaced as well
            ends[info.name] = max(ends.get(info.name, 0), info.offset + info.length)
        assert places.files == {name: end for name, end in ends.items() if end}
    assert used == ({"crc32c"} if entries else set())


def test_ranks_that_used_different_checksums_are_found() -> None:
    entry = (MetadataIndex("w"), EntryInfo("f", 0, 1, KIND_BYTES))
    assert unpack_results([pack_results([entry], None), [], pack_results([entry], "crc32")])[1] == {
        None,
        "crc32",
    }


def test_the_bytes_of_a_rank_of_a_large_job() -> None:
    """200 boxes of a model of many layers: an object for each is 20 KB and more."""
    entries: list[Entry] = []
    position = 0
    for number in range(200):
        fqn = f"optim.state.model.layers.{number // 14}.self_attn.q_proj.weight.exp_avg"
        index = MetadataIndex(fqn, torch.Size((number * 37, 0)), number * 11)
        length, crc = 64 * (number % 9 + 10), number * 2654435761 % (1 << 32)
        info = EntryInfo(
            "__17_0_" + "a" * 32 + ".distcp", position, length, KIND_TENSOR, crc, 512, 64, "float32"
        )
        entries.append((index, info))
        position += length
    (result,) = pack_results(entries, "crc32c")
    assert result.size_in_bytes == position
    assert len(pickle.dumps([result])) < 4096
