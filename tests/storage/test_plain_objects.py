"""What a training loop keeps beside its tensors loads without allow_pickle, or is warned about."""

from __future__ import annotations

import dataclasses
import datetime
import io
import pathlib
import pickle
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from dcp_fsdp_osd import StreamingReader, StreamingWriter
from dcp_fsdp_osd.storage.plain_objects import numpy_object

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@dataclasses.dataclass
class Config:
    width: int = 3


def plain() -> dict[str, Any]:
    rng = np.random.default_rng(3)
    rng.random(7)
    np.random.seed(5)
    np.random.random(3)
    return {
        "legacy": np.random.get_state(),
        "as_dict": np.random.get_state(legacy=False),
        "generator": rng.bit_generator.state,
        "mt": np.random.MT19937(3).state,
        "loss": np.float64(2.5),
        "count": np.int32(-7),
        "flag": np.bool_(True),
        "half": np.float16(0.5),
        "name": np.str_("ä b"),
        "big": np.arange(12, dtype=">i4").reshape(3, 4),
        "columns": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "empty": np.zeros((0, 3)),
        "complex": np.complex128(1 + 2j),
        "mixed": (np.float32(1.5), "x", None, 3, {"a": np.arange(3)}),
        "python": __import__("random").getstate(),
    }


def same(left: Any, right: Any) -> bool:
    if isinstance(left, np.ndarray | np.generic):
        alike = type(left) is type(right) and left.dtype == right.dtype
        return bool(alike and left.shape == right.shape and left.tobytes() == right.tobytes())
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, tuple | list):
        return (
            type(left) is type(right)
            and len(left) == len(right)
            and all(same(a, b) for a, b in zip(left, right, strict=True))
        )
    return bool(left == right)


@pytest.mark.parametrize("writer", [StreamingWriter, dcp.FileSystemWriter])
def test_numpy_values_load(tmp_path: Path, writer: Any) -> None:
    state = plain()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "torch.distributed is (disabled|unavailable)")
        dcp.save(dict(state), storage_writer=writer(tmp_path / "c"))
    found = dict.fromkeys(state)
    found.update(as_dict=plain()["as_dict"], generator=plain()["generator"], mt=plain()["mt"])
    dcp.load(found, storage_reader=StreamingReader(tmp_path / "c"))
    for key, value in state.items():
        # As NumPy's own pickles come back: elements of another byte order in this machine's.
        assert same(found[key], pickle.loads(pickle.dumps(value, protocol=2))), key
    np.random.set_state(found["legacy"])


UNSAFE = {
    "path": pathlib.PurePosixPath("x"),
    "when": datetime.datetime(2026, 1, 2),
    "config": Config(),
    "objects": np.array([Config()], dtype=object),
    "dates": np.array(["2026-01-02"], dtype="M8[D]"),
    "fields": np.zeros(2, dtype=[("a", "f8")]),
}


@pytest.mark.parametrize("key", UNSAFE)
def test_what_will_be_refused_is_told_at_the_save(tmp_path: Path, key: str) -> None:
    with pytest.warns(UserWarning, match=f"{key}.*allow_pickle=True"):
        dcp.save({key: UNSAFE[key]}, storage_writer=StreamingWriter(tmp_path / "c"))
    with pytest.raises(CheckpointException, match="could run code"):
        dcp.load({key: 1}, storage_reader=StreamingReader(tmp_path / "c"))


def _saved(pickled: bytes, copies: int = 1) -> bytes:
    made = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(made, "w") as archive:
        warnings.simplefilter("ignore")
        for _ in range(copies):
            archive.writestr("archive/data.pkl", pickled)
    return made.getvalue()


def test_crafted_objects_are_refused() -> None:
    good = pickle.dumps(np.float64(2.5), protocol=2)
    assert numpy_object(_saved(good)) is not None
    assert numpy_object(_saved(good, copies=2)) is None
    array = pickle.dumps(np.arange(3), protocol=2)
    bad = [
        good.replace(b"f8", b"O8"),
        good.replace(b"f8", b"f4"),
        good + b"x",
        good[:-3],
        b"cos\nsystem\n(Vtrue\ntR.",
        array.replace(b"K\x03\x85", b"K\x04\x85"),  # another shape than the bytes have
        array.replace(b"i8", b"V8"),
        array.replace(b"numpy\nndarray", b"numpy\nmatrix"),
        b"cnumpy\nndarray\n.",  # a class itself
        b"cnumpy\nndarray\n}(VT\nI1\nub.",
    ]
    for number, pickled in enumerate(bad):
        assert numpy_object(_saved(pickled)) is None or pickled in (good, array), number
        assert pickled not in (good, array), number
    assert numpy_object(b"no zip") is None
    assert torch.load(io.BytesIO(numpy_object(_saved(good)) or b""), weights_only=False) == 2.5
