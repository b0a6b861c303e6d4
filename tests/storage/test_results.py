"""What travels from each rank to the coordinator after a write: all of it, and little."""

from __future__ import annotations

import pickle

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import MetadataIndex

from dcp_fsdp_osd.storage.metadata import KIND_BYTES, KIND_OPAQUE, KIND_TENSOR, EntryInfo
from dcp_fsdp_osd.storage.results import Entry, pack_results, unpack_results

COUNTS = st.integers(0, 1 << 62)
CRC = st.none() | st.integers(0, (1 << 32) - 1)
INDICES = st.builds(
    MetadataIndex,
    st.text(),
    st.none() | st.lists(COUNTS, max_size=4).map(torch.Size),
    st.none() | st.integers(0, 1 << 40),
)
INFOS = st.one_of(
    st.builds(
        EntryInfo, st.text(), COUNTS, COUNTS, st.sampled_from([KIND_BYTES, KIND_OPAQUE]), CRC
    ),
    st.builds(
        EntryInfo, st.text(), COUNTS, COUNTS, st.just(KIND_TENSOR), CRC, COUNTS, COUNTS, st.text()
    ),
)


def _exact(entries: list[Entry]) -> list[object]:
    """With the hints, which indices leave out of comparisons, and with types."""
    return [
        (index.fqn, index.offset, type(index.offset), index.index, info) for index, info in entries
    ]


@given(st.lists(st.lists(st.tuples(INDICES, INFOS), max_size=5), max_size=4))
def test_all_of_it_arrives(of_ranks: list[list[Entry]]) -> None:
    sent = [pickle.loads(pickle.dumps(pack_results(each, "crc32c"))) for each in of_ranks]
    entries, used = unpack_results(sent)
    assert _exact(entries) == _exact([entry for of_rank in of_ranks for entry in of_rank])
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
