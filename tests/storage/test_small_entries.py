"""Many small entries: few calls, few requests, and the same values, checks and refusals."""

from __future__ import annotations

import cProfile
import io
import pstats
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from dcp_fsdp_osd.storage import StreamingReader, StreamingWriter
from dcp_fsdp_osd.storage.plain_objects import names_nothing
from tests.storage.states import bits

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

COUNT = 400


def _calls(call: Callable[[], object], *names: str) -> float:
    """Calls for each of COUNT entries: of functions of these names, or all of the package's own."""
    profile = cProfile.Profile()
    profile.runcall(call)
    stats: Any = pstats.Stats(profile)
    found = sum(
        count
        for (file, _, name), (_, count, *_) in stats.stats.items()
        if (name in names if names else "dcp_fsdp_osd" in file)
    )
    return float(found / COUNT)


def test_few_calls_and_one_request(tmp_path: Path) -> None:
    state = {f"step{number}": torch.tensor(float(number)) for number in range(COUNT)}
    path = tmp_path / "ck"
    writer = StreamingWriter(path, fsync=False)
    assert _calls(lambda: dcp.save(state, storage_writer=writer, no_dist=True)) < 47
    target = {key: torch.tensor(-1.0) for key in state}
    reader = StreamingReader(path)
    assert _calls(lambda: dcp.load(target, storage_reader=reader, no_dist=True)) < 90
    assert target == state
    assert reader.stats.requests <= 3


def test_numbers_are_unpickled_once(tmp_path: Path) -> None:
    """By DCP's planner; whether they name a class is seen without torch."""
    state = {f"step{number}": number for number in range(COUNT)}
    path = tmp_path / "ck"
    names = "load", "_load", "get_unsafe_globals_in_checkpoint", "numpy_object"
    writer = StreamingWriter(path, fsync=False)
    assert _calls(lambda: dcp.save(state, storage_writer=writer, no_dist=True), *names) < 0.1
    target = dict.fromkeys(state, -1)
    reader = StreamingReader(path)
    found = _calls(lambda: dcp.load(target, storage_reader=reader, no_dist=True), *names)
    assert found < 3.1  # torch.load, its _load, and the unpickler's
    assert target == state


def test_boxes_dtypes_and_strides_of_small_entries(tmp_path: Path) -> None:
    state = {
        "scalar": torch.tensor(2.5),
        "bf16": torch.randn(3, 5).bfloat16(),
        "none": torch.zeros(3, 0),
        "columns": torch.arange(30.0).view(6, 5).t(),
        "bytes": {"a": 1},
        "nearly a block": torch.randn(3800),
        "over a block": torch.randn(4200),
        "whole": torch.arange(100, dtype=torch.int64),
    }
    path = tmp_path / "ck"
    dcp.save(state, storage_writer=StreamingWriter(path, fsync=False), no_dist=True)
    for verify in (True, False):
        target: dict[str, Any] = {
            "scalar": torch.tensor(0.0, dtype=torch.float64),
            "bf16": torch.zeros(3, 5, dtype=torch.bfloat16).t().contiguous().t(),
            "none": torch.zeros(3, 0),
            "columns": torch.zeros(5, 6),
            "bytes": {"a": 0},
            "nearly a block": torch.zeros(3800),
            "over a block": torch.zeros(4200),
            "whole": torch.zeros(100, dtype=torch.int64),
        }
        versions = {k: v._version for k, v in target.items() if isinstance(v, torch.Tensor)}
        reader = StreamingReader(path, verify=verify, max_inflight_bytes=4 << 20)
        dcp.load(target, storage_reader=reader, no_dist=True)
        assert target["scalar"] == 2.5 and target["bytes"] == {"a": 1}
        for key in ("bf16", "none", "columns", "nearly a block", "over a block", "whole"):
            assert torch.equal(bits(target[key].contiguous()), bits(state[key].contiguous())), key
            assert target[key].numel() == 0 or target[key]._version > versions[key], key


def test_each_of_many_is_checked(tmp_path: Path) -> None:
    """One byte in the middle of one of many neighbours: that one is named."""
    state = {f"s{number}": torch.tensor(float(number)) for number in range(50)}
    path = tmp_path / "ck"
    dcp.save(state, storage_writer=StreamingWriter(path, fsync=False), no_dist=True)
    (file,) = path.glob("*.distcp")
    good = file.read_bytes()
    stored = StreamingReader(path).read_metadata().storage_data
    infos = {index.fqn: info for index, info in stored.items()}
    for name, part in (("s0", "header"), ("s17", "payload"), ("s49", "trailer")):
        info = infos[name]
        _, _, payload, nbytes, _ = info.dcp_fsdp_osd
        at = {"header": 100, "payload": payload + 2, "trailer": payload + nbytes + 9}[part]
        data = bytearray(good)
        data[info.offset + at] ^= 1
        file.write_bytes(data)
        with pytest.raises(CheckpointException) as caught:
            dcp.load(dict(state), storage_reader=StreamingReader(path), no_dist=True)
        text = str(caught.value)
        assert f"{name} (entry at byte {info.offset}," in text
        assert f"mismatch in the {part}" in text


def _saved(value: object, **kwargs: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **kwargs)
    return buffer.getvalue()


def test_what_names_nothing() -> None:
    for value in (3, -1, 2**70, 1.5, True, None, "c\n", {"a": [1, (2, "x")]}, 0x93, "\x93"):
        assert names_nothing(_saved(value)), value
    shared = [1]
    for other in (torch.zeros(2), {"a": torch.float32}, 1j, shared, Path("x")):
        assert names_nothing(_saved(other)) == (other is shared), other


def test_no_other_zip_names_nothing() -> None:
    """Where two readers might find different pickles, nothing is said."""
    good = _saved(5)
    assert names_nothing(good) and not names_nothing(
        _saved(5, _use_new_zipfile_serialization=False)
    )
    assert not names_nothing(good + b"x") and not names_nothing(good + good[-22:] + b"x")
    assert not names_nothing(good[:-22]) and not names_nothing(b"") and not names_nothing(good[1:])
    evil = b"\x80\x02cos\nsystem\nX\x01\x00\x00\x00x\x85R."
    for names in (
        ("archive/data.pkl", "archive/data.pkl"),
        ("archive/data.pkl", "archive/DATA.PKL"),
        ("archive/data.pkl", "other/data.pkl"),
        ("other/x", "archive/data.pkl"),
    ):
        made = io.BytesIO()
        with warnings.catch_warnings(), zipfile.ZipFile(made, "w") as archive:
            warnings.simplefilter("ignore")
            for name, pickled in zip(names, (b"\x80\x02K\x05.", evil), strict=True):
                archive.writestr(name, pickled)
        assert not names_nothing(made.getvalue()), names
    compressed = io.BytesIO()
    with zipfile.ZipFile(compressed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02K\x05.")
    assert not names_nothing(compressed.getvalue())


@pytest.mark.parametrize("part_size", [None, 1 << 16])
def test_the_smallest_lie_together(tmp_path: Path, part_size: int | None) -> None:
    """A rank's shards of norms among those of matrices: who wants the norms alone, or one matrix of
    each layer, as another layout's rank does of thousands of files, asks each file once."""
    state: dict[str, Any] = {}
    for layer in range(60):
        state[f"{layer}.norm"] = torch.full((16,), float(layer))
        state[f"{layer}.k"] = torch.randn(2000)
        state[f"{layer}.v"] = torch.randn(3000 + layer)
        state[f"{layer}.ffn"] = torch.randn(20_000)
        state[f"{layer}.step"] = torch.tensor(float(layer))
    path = tmp_path / "ck"
    writer = StreamingWriter(path, fsync=False, part_size=part_size)
    dcp.save(state, storage_writer=writer, no_dist=True)
    for wanted, most in (("norm",), 12), (("norm", "step"), 1), (("k",), 1), (("v",), 1):
        target = {k: torch.zeros_like(v) for k, v in state.items() if k.split(".")[1] in wanted}
        reader = StreamingReader(path)
        dcp.load(target, storage_reader=reader, no_dist=True)
        assert all(torch.equal(value, state[key]) for key, value in target.items())
        # Norms alone are read with some of the steps between them.
        assert reader.stats.requests - 2 <= most  # less the size and bytes of the metadata
