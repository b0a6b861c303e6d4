"""The bytes of an entry: fixed, readable by torch.load, covered by checksums to the last one."""

from __future__ import annotations

import hashlib
import io
import itertools
import random
import zipfile
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_fsdp_osd.storage.checksum import BlockHasher, RangeHasher, best_checksum, checksum_named
from dcp_fsdp_osd.storage.entry import (
    ALIGNMENT,
    Envelopes,
    block_size,
    table_bytes,
    tensor_header,
    tensor_trailer,
    unpack_table,
)
from dcp_fsdp_osd.storage.foreign import HEAD_BYTES, TAIL_BYTES, ForeignTensor, parse_foreign
from dcp_fsdp_osd.storage.memory import DTYPES, copy_flat_range, view_bytes
from tests.storage.states import bits, every_dtype

ITEMSIZES = {name: dtype.itemsize for name, dtype in DTYPES.items()}


def entry_of(tensor: torch.Tensor, offset: int = 0, *, table: bool = True) -> bytes:
    payload = bytes(view_bytes(tensor))
    dtype = str(tensor.dtype).removeprefix("torch.")
    header = tensor_header(dtype, tensor.shape, len(payload), offset)
    blocks = range(1, 2 + -(-len(payload) // block_size(len(payload))))
    return header + payload + tensor_trailer(header, len(payload), list(blocks) if table else None)


def parse(data: bytes) -> ForeignTensor | None:
    return parse_foreign(data[:HEAD_BYTES], data[-TAIL_BYTES:], len(data), ITEMSIZES)


# A change of these is a change of the format: old checkpoints must stay readable.
GOLDEN = {
    "float32 2x3": (788, "5f0d33636e559fd4"),
    "bfloat16 scalar": (766, "a4f5d2f5a81ba4d6"),
    "float8 empty": (760, "e5aadd42cd241959"),
    "int64 4-D": (10364, "44b1e25138cf107a"),
}


def test_golden_bytes() -> None:
    tensors = {
        "float32 2x3": torch.arange(6.0).view(2, 3),
        "bfloat16 scalar": torch.tensor(1.5, dtype=torch.bfloat16),
        "float8 empty": torch.empty(0, 3, dtype=torch.float8_e4m3fn),
        "int64 4-D": torch.arange(1200).view(3, 4, 10, 10),
    }
    found = {}
    for name, tensor in tensors.items():
        entry = entry_of(tensor, 5)
        found[name] = (len(entry), hashlib.sha256(entry).hexdigest()[:16])
    assert found == GOLDEN


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (2, 0, 3), (2, 3, 4, 5), (300, 70)])
@pytest.mark.parametrize("offset", [0, 13, 4096])
def test_torch_load_reads_an_entry(shape: tuple[int, ...], offset: int) -> None:
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.int16).view(shape)
    for table in (True, False):
        entry = entry_of(tensor, offset, table=table)
        for weights_only in (True, False):
            found = torch.load(io.BytesIO(entry), weights_only=weights_only)
            assert torch.equal(found, tensor) and found.stride() == tensor.stride()
        archive = zipfile.ZipFile(io.BytesIO(entry))
        assert archive.read("archive/version") == b"3\n"
        plain = parse(entry)
        assert plain is not None and plain.sizes == shape
        assert (offset + plain.payload) % ALIGNMENT == 0


@given(
    st.lists(
        st.tuples(
            st.sampled_from([(), (0,), (3,), (2, 5), (1, 1, 4, 2), (1024,)]),
            st.sampled_from(["float32", "int16", "float8_e4m3fn"]),
            st.integers(0, 1 << 40),
            st.integers(0, 255),
        ),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from([None, "crc32", "crc32c"]),
)
def test_an_envelope_from_a_template_is_the_same(
    entries: list[tuple[tuple[int, ...], str, int, int]], name: str | None
) -> None:
    checksum = None if name is None else checksum_named(name)
    envelopes = Envelopes(None if checksum is None else checksum.raw)
    for sizes, dtype, offset, value in entries:
        payload = bytes([value]) * (torch.Size(sizes).numel() * ITEMSIZES[dtype])
        header = tensor_header(dtype, sizes, len(payload), offset)
        table = None
        if checksum is not None:
            hasher = BlockHasher(checksum, block_size(len(payload)))
            hasher.update(memoryview(payload))
            table = [checksum.extend(0, header), *hasher.finish()]
        trailer = tensor_trailer(header, len(payload), table)
        assert envelopes.around(dtype, sizes, payload, offset) == (header, trailer)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40), st.integers(1, 16)), max_size=5),
    st.lists(st.integers(1, 30), min_size=1, max_size=20),
    st.integers(0, 1000),
)
def test_ranges_of_a_stream_are_hashed_in_whatever_parts_it_comes(
    drawn: list[tuple[int, int, int]], parts: list[int], position: int
) -> None:
    checksum, ranges, end = checksum_named("crc32"), [], position
    for gap, size, block in drawn:
        ranges.append((end + gap, end + gap + size, block))
        end += gap + size
    data = random.Random(position).randbytes(end - position + 7)
    expected = [
        [
            zlib.crc32(data[at - position : min(at + block, stop) - position])
            for at in range(start, stop, block)
        ]
        for start, stop, block in ranges
    ]
    hasher, at = RangeHasher(checksum, position, ranges), 0
    for size in itertools.cycle(parts):
        hasher.update(memoryview(data)[at : at + size])
        at += size
        if at >= len(data):
            break
    assert hasher.finish() == expected


def test_every_dtype() -> None:
    for name, tensor in every_dtype().items():
        found = torch.load(io.BytesIO(entry_of(tensor)))
        assert found.dtype == tensor.dtype and torch.equal(bits(found), bits(tensor)), name
        saved = io.BytesIO()
        torch.save(tensor, saved)
        data = saved.getvalue()
        plain = parse(data)
        assert plain is not None and plain.dtype == name.removeprefix("dtype.")
        assert data[plain.payload : plain.payload + plain.nbytes] == bytes(view_bytes(tensor))


def test_entries_over_4_gib(tmp_path: Path) -> None:
    """The zip64 form, around a hole: no 4 GiB are written or read."""
    numel = (5 << 30) // 2
    nbytes = 2 * numel
    header = tensor_header("bfloat16", (numel,), nbytes, 0)
    trailer = tensor_trailer(header, nbytes, [0] * (table_bytes(nbytes) // 4))
    path = tmp_path / "huge"
    with path.open("wb") as file:
        file.write(header)
        file.seek(len(header) + nbytes - 2)
        file.write(b"\x80\x3f")  # 1.0
        file.write(trailer)
    found = torch.load(path, mmap=True)
    assert found.shape == (numel,) and found[-1] == 1 and found[0] == 0
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
        file.seek(-(1 << 19), 2)
        tail = file.read()
    plain = parse_foreign(head, tail, path.stat().st_size, ITEMSIZES)
    assert plain == ForeignTensor("bfloat16", (numel,), len(header), nbytes)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(6, 4).t(),
        torch.randn(4, dtype=torch.complex64).conj(),
        torch.randn(6, 4).to_sparse(),
        torch.nn.Parameter(torch.randn(3)),
    ],
    ids=["strided", "conjugate", "sparse", "parameter"],
)
@pytest.mark.filterwarnings("ignore")
def test_what_is_not_plain_is_left_to_torch_load(tensor: torch.Tensor) -> None:
    saved = io.BytesIO()
    torch.save(tensor, saved)
    assert parse(saved.getvalue()) is None


def test_legacy_files_are_left_to_torch_load() -> None:
    saved = io.BytesIO()
    torch.save(torch.arange(3), saved, _use_new_zipfile_serialization=False)
    assert parse(saved.getvalue()) is None


def test_a_view_with_an_offset_into_its_storage() -> None:
    base = torch.arange(100)
    saved = io.BytesIO()
    torch.save(base[40:60], saved)
    plain = parse(saved.getvalue())
    assert plain is not None
    payload = saved.getvalue()[plain.payload : plain.payload + plain.nbytes]
    assert payload == bytes(view_bytes(base[40:60].clone()))


@given(st.integers(0, 2000), st.integers(1, 255))
def test_no_altered_byte_makes_the_parser_fail_or_leave_the_entry(at: int, flip: int) -> None:
    saved = io.BytesIO()
    torch.save(torch.arange(6.0), saved)
    data = bytearray(saved.getvalue())
    data[at % len(data)] ^= flip
    plain = parse(bytes(data))
    assert plain is None or (plain.payload >= 0 and plain.payload + plain.nbytes <= len(data))


@given(st.binary(max_size=4000))
def test_any_bytes_are_parsed_without_an_error(data: bytes) -> None:
    assert parse(data) is None


@given(
    st.lists(st.integers(0, 5), max_size=4).map(tuple),
    st.integers(0, 10**6),
    st.integers(0, 10**6),
)
def test_copy_flat_range(shape: tuple[int, ...], a: int, b: int) -> None:
    count = torch.Size(shape).numel()
    start, end = sorted((a % (count + 1), b % (count + 1)))
    tensor = torch.arange(count).view(shape)
    flat = torch.full((end - start,), -1)
    copy_flat_range(tensor, start, flat, into_tensor=False)
    assert flat.tolist() == list(range(start, end))
    back = torch.full(shape, -1)
    copy_flat_range(back, start, flat, into_tensor=True)
    expected = [i if start <= i < end else -1 for i in range(count)]
    assert back.reshape(-1).tolist() == expected


@pytest.mark.parametrize("name", ["crc32", "crc32c"])
def test_block_checksums_do_not_depend_on_the_pieces(name: str) -> None:
    checksum = checksum_named(name)
    data = bytearray(torch.randint(0, 256, (200_003,), dtype=torch.uint8).tolist())
    block = 1 << 14
    expected = [
        checksum.extend(0, bytes(data[at : at + block])) for at in range(0, len(data), block)
    ]
    for cuts in (
        [],
        [1],
        [block],
        [5, block - 1, block + 1, 150_000],
        list(range(0, 200_000, 7777)),
    ):
        hasher = BlockHasher(checksum, block)
        for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
            hasher.update(memoryview(data)[start:end])
        assert hasher.finish() == expected
    assert checksum.extend(checksum.extend(0, b"abc"), memoryview(b"def")) == checksum.extend(
        0, b"abcdef"
    )


def test_known_checksums() -> None:
    # The check values of both polynomials, for "123456789" (Koopman's and RFC 3720's tables).
    assert checksum_named("crc32").extend(0, b"123456789") == 0xCBF43926
    assert checksum_named("crc32c").extend(0, b"123456789") == 0xE3069283
    assert best_checksum().name == "crc32c"


def test_table_round_trip() -> None:
    for nbytes in (0, 1, 16384, 16385, 10 << 20, 3 << 30):
        header = tensor_header("uint8", (nbytes,), nbytes, 77)
        table = tuple(range(table_bytes(nbytes) // 4))
        assert unpack_table(tensor_trailer(header, nbytes, table), nbytes) == table
        assert block_size(nbytes) in [1 << k for k in range(14, 21)]
        assert table_bytes(nbytes) <= nbytes / 4000 + 8
