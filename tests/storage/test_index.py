"""The index of large metadata: what it gives is what the pickle beside it does, or an error."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import random
import shutil
import struct
import tracemalloc
import zlib
from array import array
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import CheckpointException, FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from benchmarks.llama import llama_units
from benchmarks.metadata_index import layouts, metadata_of
from dcp_fsdp_osd import FlatOptimLoadPlanner
from dcp_fsdp_osd.errors import CorruptCheckpointError, FlatOptimError
from dcp_fsdp_osd.exchange.regions import Classes, Participant, find_regions
from dcp_fsdp_osd.fsdp.optim import Target
from dcp_fsdp_osd.layout.geometry import boxes_of_interval
from dcp_fsdp_osd.load.schedule import Kind, Leaf, LoadSchedule
from dcp_fsdp_osd.storage import StreamingReader, StreamingWriter
from dcp_fsdp_osd.storage import index as index_format
from dcp_fsdp_osd.storage.chunks import ChunkTable, chunk_table
from dcp_fsdp_osd.storage.dump import dump_pickle
from dcp_fsdp_osd.storage.metadata import (
    FOOT_BYTES,
    HEAD_BYTES,
    EntryInfo,
    dump_metadata,
    entry_info,
    fill_metadata,
    index_start,
    load_index,
    load_metadata,
    storage_info,
)
from dcp_fsdp_osd.storage.places import KIND_BYTES, KIND_OPAQUE, KIND_TENSOR, Places
from dcp_fsdp_osd.tools.check import check_checkpoint
from dcp_fsdp_osd.tools.convert import rechunk
from dcp_fsdp_osd.tools.opened import Checkpoint
from tests.storage.conftest import Place
from tests.storage.states import assert_same, load

pytestmark = pytest.mark.filterwarnings("ignore")  # DCP warns that there is no process group

Boxes = list[tuple[tuple[int, ...], tuple[int, ...]]]
SHAPES: dict[str, tuple[tuple[int, ...], Boxes]] = {
    "rows": ((450, 8), [((n, 0), (1, 8)) for n in range(450)]),
    "columns": ((4, 300), [((0, n), (4, 3)) for n in range(0, 300, 3)]),
    "blocks": ((40, 40), [((a, b), (4, 4)) for b in range(0, 40, 4) for a in range(0, 40, 4)]),
    "empty": ((3, 0, 5), [((0, 0, 0), (3, 0, 5))]),
    "some empty": ((6,), [((0,), (3,)), ((3,), (3,)), ((6,), (0,))]),
    "scalar": ((), [((), ())]),
}
_PIECES = [boxes_of_interval((50, 60), 25 * n, 25 * n + 25) for n in range(120)]
SHAPES["pieces"] = (50, 60), [(box.offsets, box.sizes) for boxes in _PIECES for box in boxes]


def filled(copies: int = 3, save: str = "a" * 32) -> tuple[Metadata, list[Any]]:
    """Metadata as a planner makes them, and what ranks have written."""
    stored: dict[str, Any] = {}
    entries: list[tuple[MetadataIndex, EntryInfo]] = []
    for name, (shape, boxes) in SHAPES.items():
        for copy_number in range(copies):
            key = f"{name}.{copy_number}.weight"
            chunks = [ChunkStorageMetadata(torch.Size(a), torch.Size(b)) for a, b in boxes]
            properties = TensorProperties(torch.bfloat16 if copy_number else torch.float32)
            stored[key] = TensorStorageMetadata(properties, torch.Size(shape), chunks)
            for number, chunk in enumerate(chunks):
                nbytes = chunk.sizes.numel() * properties.dtype.itemsize
                kind = KIND_OPAQUE if number == 5 else KIND_TENSOR
                extra: Any = ()
                if kind == KIND_TENSOR:
                    extra = (704, nbytes, str(properties.dtype).removeprefix("torch."))
                crc = None if name == "blocks" else zlib.crc32(f"{key}{number}".encode())
                file = f"__{number % 7}_0_{save}.distcp"
                at = 5_000_000_000 * copy_number + 4096 * len(entries)
                info = EntryInfo(file, at, nbytes + 1600, kind, crc, *extra)
                entries.append((MetadataIndex(key, chunk.offsets, number), info))
    for number in range(30):
        stored[f"option.{number}"] = BytesStorageMetadata()
        info = EntryInfo(f"__0_1_{save}.distcp", 700 * number, 700, KIND_BYTES, number)
        entries.append((MetadataIndex(f"option.{number}"), info))
    paths = {key: tuple(key.split(".")) for key in stored}
    metadata = Metadata(stored, planner_data=paths)
    metadata.storage_meta = StorageMeta(checkpoint_id="/there", save_id=save)
    fill_metadata(metadata, entries, "crc32c")
    return metadata, entries


def in_part(data: bytes) -> Metadata:
    start = index_start(data[-FOOT_BYTES:], len(data), "test")
    assert start is not None
    return load_index(data[start:], len(data), "test")


@pytest.fixture(scope="module")
def data() -> bytes:
    return dump_metadata(filled()[0])


def everything(metadata: Metadata) -> Any:
    names: set[str] = set()
    entries = {i: entry_info(info, "", names) for i, info in metadata.storage_data.items()}
    return entries, metadata.state_dict_metadata, metadata.planner_data, metadata.storage_meta


def test_it_gives_what_the_pickle_has(data: bytes) -> None:
    metadata, entries = filled()
    found = in_part(data)
    expected = dict(entries), metadata.state_dict_metadata, metadata.planner_data
    for each in (found, load_metadata(data, "test"), pickle.loads(data), copy.deepcopy(found)):
        assert everything(each) == (*expected, metadata.storage_meta)
    assert list(found.storage_data) == list(load_metadata(data, "test").storage_data)
    copied = pickle.loads(pickle.dumps(found))
    assert type(copied.storage_data) is dict
    assert {type(getattr(v, "chunks", [])) for v in copied.state_dict_metadata.values()} == {list}
    chunks = found.state_dict_metadata["rows.1.weight"].chunks
    plain = list(chunks)
    assert (len(chunks), chunks[-1], chunks[2:5]) == (450, plain[-1], plain[2:5])
    rows = "rows.1.weight"
    for key, offset in ((rows, None), ("none", None), ("option.1", [0]), (rows, [0, 1]),
                        (rows, [450, 0]), ("scalar.0.weight", [0])):  # fmt: skip
        wrong = MetadataIndex(key, offset)
        assert wrong not in found.storage_data and found.storage_data.get(wrong) is None
    with pytest.raises(IndexError):
        chunks[450]


def test_metadata_are_no_larger_than_stocks(data: bytes) -> None:
    metadata, entries = filled()
    infos = pickle.loads(data).storage_data
    for info in infos.values():
        del info.dcp_fsdp_osd
    stock = Metadata(
        metadata.state_dict_metadata, metadata.planner_data, infos, metadata.storage_meta
    )
    assert len(entries) > index_format.INDEXED
    assert len(data) < len(pickle.dumps(stock))


def test_small_metadata_and_odd_ones_have_none(data: bytes) -> None:
    small = dump_metadata(filled(copies=1)[0])
    assert index_start(small[-FOOT_BYTES:], len(small), "test") is None
    metadata, entries = filled()
    of_stock = [(index, EntryInfo(e.name, e.offset, e.length)) for index, e in entries]
    more = [*entries, (MetadataIndex("of nothing"), entries[0][1])]
    for odd in (entries[1:], more, of_stock):
        fill_metadata(metadata, odd, None)
        written = dump_metadata(metadata)
        assert index_start(written[-FOOT_BYTES:], len(written), "test") is None
        assert dict(odd) == everything(pickle.loads(written))[0]


@pytest.mark.parametrize("seed", range(4))
def test_any_entries_in_any_order_come_back(seed: int) -> None:
    """Entries are written by the column: what is new, of which kind, and how large in each."""
    rng = random.Random(seed)
    numbers = (
        0,
        255,
        256,
        0xFFFF,
        0x10000,
        (1 << 31) - 1,
        1 << 31,
        (1 << 39) - 1,
        1 << 39,
        1 << 61,
    )
    chunks = [ChunkStorageMetadata(torch.Size((n,)), torch.Size((1,))) for n in range(40)]
    stored: dict[str, Any] = {}
    entries: list[tuple[MetadataIndex, EntryInfo]] = []
    for key in (f"key.{number}" * rng.choice((1, 60)) for number in range(70)):
        boxes = chunks if rng.random() < 0.5 else copy.deepcopy(chunks)
        stored[key] = TensorStorageMetadata(TensorProperties(), torch.Size((40,)), [*boxes])
        for number, chunk in enumerate(boxes):
            kind = rng.choice((None, 0, 1, 1, 1, 2)) if seed % 2 else KIND_TENSOR
            crc = rng.choice((None, *numbers[:-2])) if kind is not None else None
            extra = (704, rng.choice(numbers), f"int{rng.choice((8, 16))}") if kind == 1 else ()
            at = torch.Size((10**9 + number,)) if rng.random() < 0.01 else chunk.offsets
            info = EntryInfo(
                f"file {rng.randrange(60)}", rng.choice(numbers), 1 << 62, kind, crc, *extra
            )
            entries.append((MetadataIndex(key, at, rng.choice((None, *numbers))), info))
    if seed > 1:
        rng.shuffle(entries)
    metadata = Metadata(stored)
    fill_metadata(metadata, entries, "crc32c")
    found = pickle.loads(dump_metadata(metadata))
    assert found.state_dict_metadata == stored
    written = [(key, key.index, storage_info(info)) for key, info in entries]
    read = [(key, key.index, info) for key, info in found.storage_data.items()]
    assert read == written
    ours = [[getattr(info, "dcp_fsdp_osd", None) for *_, info in each] for each in (read, written)]
    assert ours[0] == ours[1]


@settings(max_examples=40)
@given(
    st.sampled_from(sorted(set(SHAPES) - {"scalar", "empty", "some empty"})),
    st.lists(st.integers(0, 10**6), min_size=4, max_size=4),
)
def test_boxes_that_overlap_one_are_found(name: str, drawn: list[int]) -> None:
    shape, boxes = SHAPES[name]
    low = [n % size for n, size in zip(drawn, shape, strict=False)]
    sizes = [n % (s - o) + 1 for n, s, o in zip(drawn[2:], shape, low, strict=False)]
    chunks = [ChunkStorageMetadata(torch.Size(a), torch.Size(b)) for a, b in boxes]
    stored = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size(shape), chunks)
    wanted = ChunkStorageMetadata(torch.Size(low), torch.Size(sizes))
    schedule = LoadSchedule()
    schedule.add_tensor(Leaf(Kind.WHOLE, None, "w", (), {"w": "w"}), stored, [(None, wanted)])
    expected = create_read_items_for_chunk_list("w", stored, [wanted])
    assert sorted(map(repr, schedule.items)) == sorted(map(repr, expected))
    table = chunk_table(stored)
    assert all(table.find(a) == number for number, (a, _) in enumerate(boxes))
    assert all(table.by_offsets[a] == table.find(a) for a, _ in boxes)
    assert table.find([n + 1 for n in shape]) is None and table.find([0]) in (None, 0)


def test_a_rank_plans_alike_with_it_and_without() -> None:
    ranks = layouts(llama_units(4096, 1), 200)
    metadata, entries = metadata_of(ranks)
    fill_metadata(metadata, entries, "crc32c")
    data = dump_metadata(metadata)
    layout = ranks[5]
    params = tuple(torch.nn.Parameter(torch.zeros(p.numel, device="meta")) for p in layout.params)
    optim = torch.optim.AdamW(params)
    target = Target(layout, params, (torch.device("meta"),) * len(params))
    plans, regions = [], []
    for found in (in_part(data), load_metadata(data, "test")):
        planner = FlatOptimLoadPlanner.from_targets({"optim": optim}, {"optim": target})
        planner.set_up_planner({"optim": {}}, found, True)
        plans.append(planner.create_local_plan().items)
        items = tuple(plans[-1])
        dtypes = tuple(None if "groups" in i.dest_index.fqn else torch.float32 for i in items)
        cuda = (False,) * len(items)
        digest = Participant.digest_of(items, dtypes, cuda)
        whole = [Participant(0, "host", True, items, dtypes, cuda, digest)]
        regions.append(find_regions(Classes(whole), found))
    assert plans[0] == plans[1] and len(plans[0]) > 10
    assert [i.storage_index.index for i in plans[0]] == [i.storage_index.index for i in plans[1]]
    assert all(regions[0].files) and len(regions[0]) > 10
    for field in dataclasses.fields(regions[0]):
        assert np.array_equal(*(getattr(each, field.name) for each in regions)), field.name
    places = in_part(data).storage_data
    assert isinstance(places, Places)
    for key, stored in metadata.state_dict_metadata.items():
        chunks = getattr(stored, "chunks", None)
        offsets = [None] if chunks is None else [tuple(each.offsets) for each in chunks]
        found = [places.entry(MetadataIndex(key, at)) for at in offsets]
        expected = [each and (each.name, each.offset) for each in found]
        assert places.located(key, offsets) == expected and all(expected)
        assert places.located(key, [*offsets, (1 << 50,) * 3]) == [*expected, None]


# ---------------------------------------------------------------- damage


def test_damage_is_found_when_it_is_read(data: bytes) -> None:
    start = index_start(data[-FOOT_BYTES:], len(data), "test")
    assert start is not None
    tail = bytearray(data[start:])
    told = 0
    for at in (*range(0, len(tail), 499), *range(len(tail) - 100, len(tail))):
        tail[at] ^= 1 << at % 8
        try:
            begin = index_start(bytes(tail[-FOOT_BYTES:]), len(data), "test")
            if begin is None:  # it is read whole, and the seal tells
                load_metadata(data[:start] + bytes(tail), "test")
            else:
                load_index(bytes(tail[begin - start :]), len(data), "test")
        except CorruptCheckpointError as error:
            told += "index" in str(error)
        else:  # the seal's checksum of what is not read
            assert len(tail) - 12 <= at < len(tail) - 8
        tail[at] ^= 1 << at % 8
    assert told > len(tail) // 499
    for size in range(FOOT_BYTES, len(data), 997):
        assert index_start(data[:size][-FOOT_BYTES:], size, "test") is None


def lying(data: bytes, change: Callable[[Any], None]) -> bytes:
    """A metadata file whose index was changed, with checksums that match."""
    start = index_start(data[-FOOT_BYTES:], len(data), "test")
    assert start is not None
    footer = index_format.read_footer(data[:-20], len(data) - 20)
    assert footer is not None
    head, names, blocks = index_format.unpack_index(data[start : start + footer.length], footer)
    parts = SimpleNamespace(head=pickle.loads(head), names=names, blocks=blocks, index=None)
    for name in ("tilings", "keys", "blocks"):
        setattr(parts, f"of_{name}", array("q", parts.head.dcp_fsdp_osd[name]))
    change(parts)
    for name in ("tilings", "keys", "blocks"):
        parts.head.dcp_fsdp_osd[name] = getattr(parts, f"of_{name}").tobytes()
    index = index_format.pack_index(parts.head, parts.names, parts.blocks)
    return sealed(dump_pickle(pickle.loads(data), parts.index or index))


def sealed(pickled: bytes) -> bytes:
    return pickled + struct.pack("<8sIQ", b"\nDCPOSD1", zlib.crc32(pickled), len(pickled))


def of_other(change: Callable[[Metadata, dict[MetadataIndex, EntryInfo]], None]) -> Any:
    """The index of other metadata in place of its own."""

    def make(parts: Any) -> None:
        metadata, entries = filled()
        known = dict(entries)
        change(metadata, known)
        fill_metadata(metadata, known.items(), "crc32c")
        parts.index = index_format.index_of(metadata)
        assert parts.index is not None

    return make


def _entry(**fields: Any) -> Any:
    def change(_: Metadata, entries: dict[MetadataIndex, EntryInfo]) -> None:
        for index, info in entries.items():
            entries[index] = info._replace(**fields) if index.fqn.startswith("rows") else info

    return of_other(change)


def _boxes(boxes: Boxes) -> Any:
    def change(metadata: Metadata, entries: dict[MetadataIndex, EntryInfo]) -> None:
        stored = metadata.state_dict_metadata["rows.0.weight"]
        chunks = [ChunkStorageMetadata(torch.Size(a), torch.Size(b)) for a, b in boxes]
        vars(stored).update(chunks=chunks)
        for index in [each for each in entries if each.fqn == "rows.0.weight"]:
            del entries[index]
        for number, chunk in enumerate(chunks):
            entries[MetadataIndex("rows.0.weight", chunk.offsets)] = EntryInfo(
                "__0_0.distcp", number * 100, 90, KIND_OPAQUE
            )

    return of_other(change)


def _set(name: str, at: int, value: int) -> Any:
    return lambda parts: getattr(parts, name).__setitem__(at, value)


ROWS = SHAPES["rows"][1]
LIES: dict[str, Any] = {
    "a box is missing": _boxes(ROWS[:-1]),
    "two boxes overlap": _boxes([*ROWS[:-3], ((447, 0), (2, 8)), ((448, 0), (1, 8))]),
    "a box is there twice": _boxes([*ROWS[:-1], ((449, 0), (1, 4)), ((448, 4), (1, 4))]),
    "a box lies outside": lambda parts: [
        setattr(parts.head.state_dict_metadata[f"rows.{n}.weight"], "size", torch.Size((449, 8)))
        for n in range(3)
    ],
    "a file elsewhere": _entry(name="../../secret"),
    "an entry before its file": _entry(offset=-5),
    "an entry without end": _entry(length=1 << 62),
    "a payload longer than its entry": _entry(payload=1 << 40),
    "a CRC of no number": _entry(crc=-7),
    "boxes without end": _set("of_tilings", 0, 1 << 60),
    "a million boxes": _set("of_tilings", 0, 1_000_000),
    "fewer boxes than there are": _set("of_tilings", 0, 449),
    "a negative number of boxes": _set("of_tilings", 0, -1),
    "another tensor's boxes": _set("of_keys", 0, 2),
    "boxes of nothing": _set("of_keys", 0, 77),
    "a tensor without boxes": _set("of_keys", 0, -1),
    "more tables than there are": _set("of_blocks", 0, 99),
    "more bytes than there are": _set("of_blocks", 1, 1 << 40),
    "no keys": lambda parts: parts.of_keys.__delitem__(slice(None)),
    "blocks in another order": lambda parts: setattr(parts, "blocks", parts.blocks[::-1]),
    "blocks of zeros": lambda parts: setattr(parts, "blocks", bytes(len(parts.blocks))),
    "no names": lambda parts: setattr(parts, "names", []),
    "a class in the head": lambda parts: vars(parts.head).update(planner_data=Path.cwd),
    "a tensor more": lambda parts: parts.head.state_dict_metadata.update(
        more=parts.head.state_dict_metadata["scalar.0.weight"]
    ),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_an_index_that_lies_is_an_error(data: bytes, lie: Any) -> None:
    """And takes no memory that the file does not."""
    wrong = lying(data, lie)
    assert everything(pickle.loads(wrong))[:2] == everything(pickle.loads(data))[:2]
    gc.collect()
    tracemalloc.start()
    try:
        with pytest.raises(FlatOptimError):
            found = in_part(wrong)
            for stored in found.state_dict_metadata.values():
                list(getattr(stored, "chunks", ()))
            for index in found.storage_data:
                found.storage_data[index]
        assert tracemalloc.get_traced_memory()[1] < 24 * len(wrong)
    finally:
        tracemalloc.stop()


def test_a_bomb_is_not_unpacked(data: bytes) -> None:
    bomb = zlib.compress(bytes(200 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(CorruptCheckpointError, match="another length"):
            index_format.inflated(bomb, 1000)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


# ---------------------------------------------------------------- checkpoints

STATE = {
    "w": torch.arange(8400.0).view(2100, 4),
    "lr": 0.5,
    **{f"b{n}": torch.arange(60.0) + n for n in range(5)},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of more than 2000 boxes."""
    folder = tmp_path_factory.mktemp("indexed")
    dcp.save(dict(STATE), storage_writer=StreamingWriter(folder / "few", fsync=False))
    with Checkpoint(folder / "few") as few:
        rechunk(few, folder / "many", chunk_bytes=16)
    written = (folder / "many" / ".metadata").read_bytes()
    assert index_start(written[-FOOT_BYTES:], len(written), "test") is not None
    return folder / "many"


def test_everybody_reads_it(whole: Path) -> None:
    reader = StreamingReader(whole)
    for each in (reader, FileSystemReader(whole)):
        assert_same(load(each, STATE), STATE)
    unsafe = StreamingReader(whole, allow_pickle=True).read_metadata()
    assert type(unsafe.state_dict_metadata["w"].chunks) is list
    assert isinstance(reader.read_metadata().state_dict_metadata["w"].chunks, ChunkTable)
    assert check_checkpoint(whole).whole


def test_no_index_gives_other_bytes(whole: Path, tmp_path: Path) -> None:
    """Two entries of one length, one of them in place of the other: their checksums are right."""
    place = shutil.copytree(whole, tmp_path / "c")
    written = (place / ".metadata").read_bytes()
    metadata = load_metadata(written, "test")
    names: set[str] = set()
    entries = {i: entry_info(e, "", names) for i, e in metadata.storage_data.items()}
    one, two = (each for each in entries if each.fqn == "w" and each.offset in ((7, 0), (8, 0)))
    entries[one] = entries[two]
    fill_metadata(metadata, entries.items(), "crc32c")
    lie = index_format.index_of(metadata)
    (place / ".metadata").write_bytes(sealed(dump_pickle(pickle.loads(written), lie)))
    verdict = check_checkpoint(place)
    assert not verdict.whole and "its index names other entries" in str(verdict.problems[0])


def test_it_does_not_outlive_its_metadata(whole: Path, tmp_path: Path) -> None:
    """Unpickled, changed and pickled by others, or with the end of another checkpoint's."""
    place = shutil.copytree(whole, tmp_path / "c")
    path = place / ".metadata"
    written = path.read_bytes()
    metadata = pickle.loads(written)
    metadata.state_dict_metadata.pop("w")
    again = pickle.dumps(metadata)
    for changed in (again, again + written[-20:], written + again, again + written):
        path.write_bytes(changed)
        with pytest.raises(CheckpointException, match=r"altered|cut off|pickle"):
            load(StreamingReader(place), STATE)
    dcp.save(dict(STATE), storage_writer=StreamingWriter(place, fsync=False, overwrite=True))
    assert_same(load(StreamingReader(place), STATE), STATE)
    shutil.rmtree(place)
    dcp.save(dict(STATE), storage_writer=dcp.FileSystemWriter(place))
    assert_same(load(StreamingReader(place), STATE), STATE)


# ---------------------------------------------------------------- requests


class Recorded:
    """A store; notes which of its reading methods are asked for."""

    def __init__(self, store: Any, asked: list[str]) -> None:
        self.store, self.asked = store, asked

    def __getattr__(self, name: str) -> Any:
        if name in ("read", "read_into", "size"):
            self.asked.append(name)
        return getattr(self.store, name)


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_what_is_read_of_it(data: bytes, kind: str, make_place: Callable[[str], Place]) -> None:
    """Of large metadata the end alone, in few requests; of others all, in one."""
    place = make_place(kind)
    metadata, _ = filled()
    metadata.extra_of_others = [bytes(2 << 20)]  # which the index, compressed, has as well
    large = dump_metadata(metadata)
    small = dump_metadata(filled(copies=1)[0])
    size = ["size"] if kind == "local" else []
    ends = ["size", "read_into", "read_into", "read_into"]
    ends = ends if kind == "local" else ["read", "size", "read_into"]
    for written, calls in ((small, [*size, "read"]), (data, [*size, "read"]), (large, ends)):
        asked: list[str] = []
        place.store().put(".metadata", written, exclusive=False)
        reader = StreamingReader(
            place.url, backend=lambda _, asked=asked: Recorded(place.store(), asked)
        )
        found = reader.read_metadata()
        assert everything(found)[:2] == everything(pickle.loads(written))[:2]
        assert asked == calls
        tail = 0 if kind == "local" else 4 << 20  # so much is read in one request
        index = len(written) - (index_start(written[-FOOT_BYTES:], len(written), "it") or 0)
        expected = max(index, min(tail, len(written))) if written is large else len(written)
        assert 0 <= reader.stats.bytes - expected <= HEAD_BYTES + FOOT_BYTES
