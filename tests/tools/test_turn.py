"""``diff``, ``export``, ``import`` and ``rechunk``: on ours, stock's and broken checkpoints."""

from __future__ import annotations

import json
import math
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

from dcp_fsdp_osd.errors import CorruptCheckpointError, FlatOptimError, StorageError
from dcp_fsdp_osd.layout.geometry import Box
from dcp_fsdp_osd.storage.chunks import chunk_table
from dcp_fsdp_osd.tools import (
    Checkpoint,
    check_checkpoint,
    compare,
    export_safetensors,
    export_torch,
    import_file,
    rechunk,
)
from dcp_fsdp_osd.tools.convert import cut_boxes
from dcp_fsdp_osd.tools.opened import WINDOW
from tests.servers import EmbeddedS3
from tests.tools.made import KINDS, broken, options, run, run_json, save, state, upload

pytestmark = pytest.mark.filterwarnings("ignore")  # DCP warns that there is no process group
OLD = Path(__file__).parents[1] / "data" / "checkpoints_v1"
NAN, INF = float("nan"), float("inf")


def _odd() -> dict[str, Any]:
    """Tensors of all kinds, and objects, some with tensors in them."""
    shared = torch.arange(6.0)
    return {
        "model": {
            "a": torch.randn(5, 3),
            "b": torch.randn(4).to(torch.bfloat16),
            "c": torch.tensor([True, False]),
            "d": torch.empty(0, 3),
            "e": torch.tensor(2.5, dtype=torch.float64),
            "f": torch.randn(7).to(torch.float8_e4m3fn),
            "g": torch.tensor([1 + 2j]),
            "h": torch.tensor([1, 2, 65535], dtype=torch.uint16),
            "i": shared[:3],
            "j": shared[3:],
        },
        "list": [torch.ones(2), {"x": torch.zeros(3)}],
        "object": {"lr": 0.1, "names": ["a", "b"], "none": None},
        "tuple": (1, torch.arange(4), "x"),
        "step": 3,
    }


def _assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype and found.shape == expected.shape
        raw = [each.contiguous().view(-1).view(torch.uint8) for each in (found, expected)]
        assert torch.equal(*raw)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            _assert_same(found[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected) and type(found) is type(expected)
        for one, other in zip(found, expected, strict=True):
            _assert_same(one, other)
    else:
        assert found == expected


# ---------------------------------------------------------------- reading any part


def test_chunks_that_overlap_a_box_are_found() -> None:
    """Against looking at every chunk, for random cuts of random shapes."""
    draw = random.Random(0)
    for _ in range(200):
        shape = tuple(draw.randint(1, 6) for _ in range(draw.randint(1, 3)))
        boxes = [Box((0,) * len(shape), shape)]
        for _ in range(draw.randint(0, 6)):  # cut one of them in two
            box = boxes.pop(draw.randrange(len(boxes)))
            dim = draw.randrange(len(shape))
            at = draw.randint(0, box.sizes[dim])
            sizes, rest, offsets = list(box.sizes), list(box.sizes), list(box.offsets)
            sizes[dim], rest[dim] = at, box.sizes[dim] - at
            offsets[dim] += at
            boxes += [Box(box.offsets, tuple(sizes)), Box(tuple(offsets), tuple(rest))]
        stored = dcp.metadata.TensorStorageMetadata(
            dcp.metadata.TensorProperties(),
            torch.Size(shape),
            [
                dcp.metadata.ChunkStorageMetadata(torch.Size(b.offsets), torch.Size(b.sizes))
                for b in boxes
            ],
        )
        low = [draw.randrange(size) for size in shape]
        wanted = Box(
            tuple(low),
            tuple(draw.randint(0, size - at) for size, at in zip(shape, low, strict=True)),
        )
        table = chunk_table(stored)
        expected = [
            (number, box.offsets, both.offsets, both.sizes)
            for number, box in enumerate(boxes)
            if (both := box.overlap(wanted)) is not None
        ]
        for _ in range(40):  # however often boxes were asked for before
            assert table.overlapping(wanted.offsets, wanted.sizes) == expected
        for number, box in enumerate(boxes):
            if box.numel:
                assert table.at(number) == (box.offsets, box.sizes)
                near = draw.choice([None, number, number - 1, len(boxes), -1])
                assert table.find(box.offsets, near) == number


@pytest.mark.parametrize("most", [1, 4, 7, 24, 100, 10**6])
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (7,), (5, 3), (2, 3, 4), (1, 1, 9)])
def test_boxes_of_a_size_fill_a_tensor(shape: tuple[int, ...], most: int) -> None:
    counts = torch.zeros(shape, dtype=torch.int64)
    for box in cut_boxes(shape, 4, most):
        assert box.numel * 4 <= max(most, 4)
        view = counts[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]
        assert view.is_contiguous()
        view += 1
    assert bool((counts == 1).all())


# ---------------------------------------------------------------- diff


def test_ours_and_stocks_are_the_same(run_folder: Path) -> None:
    found = run_json("diff", run_folder / "ours", run_folder / "stock")
    assert found["equal"] and found["same"] == len(run_json("show", run_folder / "ours")["rows"])


def test_diff_tells_which_and_by_how_much(tmp_path: Path) -> None:
    one = {
        "same": torch.tensor([1.0, NAN]),
        "some": torch.tensor([1.0, 2.0, 3.0, 4.0]),
        "zero": torch.tensor([0.0]),
        "nan": torch.tensor([1.0, NAN, 5.0]),
        "inf": torch.tensor([INF, INF]),
        "shape": torch.ones(2, 3),
        "dtype": torch.ones(2),
        "big": torch.tensor([2**62], dtype=torch.int64),
        "complex": torch.tensor([3 + 4j]),
        "kind": torch.ones(1),
        "object": {"lr": 0.1, "nan": NAN},
        "value": {"lr": 0.1},
        "numpy": np.arange(3),
        "gone": 1,
    }
    two = {
        **one,
        "some": torch.tensor([1.0, 2.5, 3.0, 3.0]),
        "zero": torch.tensor([-0.0]),
        "nan": torch.tensor([NAN, NAN, 5.5]),
        "inf": torch.tensor([INF, -INF]),
        "shape": torch.ones(3, 2),
        "dtype": torch.ones(2, dtype=torch.float64),
        "big": torch.tensor([2**62 + 1024], dtype=torch.int64),
        "complex": torch.tensor([0j]),
        "kind": 1,
        "value": {"lr": 0.2},
        "numpy": np.arange(3) + 1,
        "new": 1,
    }
    del two["gone"]
    save(one, tmp_path / "one")
    save(two, tmp_path / "two")
    found = run_json("diff", tmp_path / "one", tmp_path / "two", status=1)
    told = {each["key"]: each for each in found["differences"]}
    assert (
        found["same"] == 3
    )  # same, object.lr, object.nan: DCP makes keys of dicts of plain values
    counts = {key: (each["elements"], each["numel"]) for key, each in told.items()}
    assert counts["some"] == (2, 4) and told["some"]["largest"] == 1.0
    assert counts["zero"] == (1, 1) and told["zero"]["largest"] == 0.0
    assert counts["nan"] == (2, 3) and told["nan"]["largest"] == 0.5
    assert counts["inf"] == (1, 2) and told["inf"]["largest"] == "inf"
    assert told["big"]["largest"] == 1024.0 and told["complex"]["largest"] == 5.0
    words = {
        "shape": "(2, 3) in the first, (3, 2) in the second",
        "dtype": "torch.float32 in the first",
        "kind": "tensor in the first, object in the second",
        "value.lr": "0.1 in the first, 0.2 in the second",
        "numpy": "array([0, 1, 2])",
        "gone": "not in the second",
        "new": "not in the first",
    }
    for key, word in words.items():
        assert word in told[key]["what"] and counts[key] == (None, None), told[key]
    assert set(told) == {"some", "zero", "nan", "inf", "big", "complex", *words}
    assert (
        "2 of 4 elements differ, by up to 1"
        in run("diff", tmp_path / "one", tmp_path / "two").output
    )
    near = run_json("diff", tmp_path / "one", tmp_path / "two", "--atol", 1, status=1)
    told = {each["key"]: each["elements"] for each in near["differences"]}
    assert "some" not in told and "zero" not in told and told["nan"] == 1 and told["inf"] == 1
    assert run("diff", tmp_path / "one", tmp_path / "two", "same").exit_code == 0
    assert run("diff", tmp_path / "one", tmp_path / "two", "nothing").exit_code == 2
    assert run("diff", tmp_path / "one", tmp_path / "three").exit_code == 2


@pytest.mark.parametrize("most", [30, 1 << 20])
def test_chunkings_do_not_matter(tmp_path: Path, run_folder: Path, most: int) -> None:
    """Cut anew as small as can be, and what two ranks saved: the same, and one element is not."""
    for name, source in (("new", run_folder / "ours"), ("old", OLD / "adamw_flat_world2")):
        with Checkpoint(source) as before:
            rechunk(before, tmp_path / name, chunk_bytes=most * (10 if name == "new" else 1))
            with Checkpoint(tmp_path / name) as after:
                assert after.metadata.planner_data == before.metadata.planner_data
                counts = [len(stored.chunks) for stored in after.tensors.values()]
                assert (max(counts) > 2) == (most == 30)
                assert compare(before, after).equal
        assert check_checkpoint(tmp_path / name).whole
    other = state()
    other["optim"].optim.state_dict()["state"][0]["exp_avg"][50, 7] += 1
    save(other, tmp_path / "other")
    found = run_json("diff", tmp_path / "new", tmp_path / "other", status=1)
    (told,) = found["differences"]
    assert (told["key"], told["elements"]) == ("optim.state.0.weight.exp_avg", 1)
    assert told["largest"] == pytest.approx(1)


# ---------------------------------------------------------------- export


@pytest.mark.parametrize("kind", KINDS)
def test_export_to_torch_is_the_state_dict(tmp_path: Path, kind: str) -> None:
    value = _odd()
    save(value, tmp_path / "c", kind)
    assert run("export", tmp_path / "c", tmp_path / "out.pt").exit_code == 0
    _assert_same(torch.load(tmp_path / "out.pt", weights_only=True), value)
    mapped = torch.load(tmp_path / "out.pt", weights_only=True, mmap=True)
    _assert_same(mapped, value)
    for key, part in (("model", value["model"]), ("model.b", value["model"]["b"]), ("step", 3)):
        run_json("export", tmp_path / "c", tmp_path / "part.pt", "--key", key, "--overwrite")
        _assert_same(torch.load(tmp_path / "part.pt", weights_only=True), part)
    assert {file.name for file in tmp_path.iterdir()} == {"c", "out.pt", "part.pt"}


@pytest.mark.parametrize("kind", KINDS)
def test_export_to_safetensors(tmp_path: Path, kind: str) -> None:
    value = _odd()
    save(value, tmp_path / "c", kind)
    del value["model"]["g"], value["model"]["h"]  # of which its reader may have none
    save(value, tmp_path / "plain", kind)
    told = run_json("export", tmp_path / "plain", tmp_path / "m.safetensors", "--key", "model")
    found = safetensors.torch.load_file(tmp_path / "m.safetensors")
    _assert_same(dict(sorted(found.items())), value["model"])
    assert told["left_out"] == []
    result = run("export", tmp_path / "plain", tmp_path / "all.safetensors")
    assert result.exit_code == 0 and "left out" in result.stderr
    found = safetensors.torch.load_file(tmp_path / "all.safetensors")
    assert set(found) == {*(f"model.{key}" for key in value["model"]), "list.0", "list.1.x"}
    run_json("import", tmp_path / "m.safetensors", tmp_path / "back", "--key", "model")
    assert run("diff", tmp_path / "plain", tmp_path / "back", "model").exit_code == 0


def test_export_streams_across_windows(tmp_path: Path) -> None:
    """Tensors that windows cut, in both formats and back; no window is larger than it may be."""
    count = (WINDOW // 4) * 3 // 4 + 13
    value = {"a": torch.arange(count, dtype=torch.int32), "b": torch.arange(count).to(torch.int16)}
    value["c"] = torch.arange(count, dtype=torch.int32).neg().view(-1, 1)
    save(value, tmp_path / "c", "stock")
    with Checkpoint(tmp_path / "c") as checkpoint:
        windows = checkpoint.windows(value)
        assert len(windows) == 2 and checkpoint.room(windows).nbytes <= WINDOW + 1024
        export_torch(checkpoint, tmp_path / "out.pt")
        export_safetensors(checkpoint, tmp_path / "out.safetensors")
    _assert_same(torch.load(tmp_path / "out.pt", weights_only=True), value)
    found = safetensors.torch.load_file(tmp_path / "out.safetensors")
    _assert_same(dict(sorted(found.items())), value)


def test_export_of_the_optimizer(run_folder: Path, tmp_path: Path) -> None:
    """Lists of param groups are lists; the same as stock's loader makes of it."""
    run_json("export", run_folder / "ours", tmp_path / "out.pt")
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    (group,) = found["optim"]["param_groups"]
    assert group["params"] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert found["step"] == 7
    expected = state()["optim"].optim.state_dict()["state"][0]["exp_avg"]
    _assert_same(found["optim"]["state"]["0.weight"]["exp_avg"], expected)


@pytest.mark.parametrize("name", ["out.pt", "out.safetensors"])
def test_no_half_written_file(run_folder: Path, tmp_path: Path, name: str) -> None:
    path = broken(run_folder / "ours", tmp_path / "broken", "payload")
    result = run("export", path, tmp_path / name)
    assert result.exit_code == 1 and "checksum mismatch" in result.output
    (tmp_path / "kept").write_text("x")
    assert {file.name for file in tmp_path.iterdir()} == {"broken", "kept"}


def test_export_says_what_is_wrong(run_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "there.pt").write_text("x")
    for target, said, *more in (
        (tmp_path / "there.pt", "exists"),
        (tmp_path / "no" / "out.pt", "does not exist"),
        (tmp_path / "out.txt", "rechunk"),
        ("s3://bucket/out.pt", "expected a local path"),
        (tmp_path / "out.pt", "did you mean model", "--key", "model.0.wieght"),
    ):
        result = run("export", run_folder / "ours", target, *more)
        assert result.exit_code == 2 and said in result.output, result.output
    assert (tmp_path / "there.pt").read_text() == "x"
    assert run("export", run_folder / "ours", tmp_path / "there.pt", "--overwrite").exit_code == 0
    assert torch.load(tmp_path / "there.pt", weights_only=True)["step"] == 7
    save({"rng": np.arange(3), "a": torch.ones(2)}, tmp_path / "numpy")
    with Checkpoint(tmp_path / "numpy") as checkpoint:
        with pytest.raises(FlatOptimError, match="weights_only=True"):
            export_torch(checkpoint, tmp_path / "numpy.pt")
        assert export_torch(checkpoint, tmp_path / "a.pt", key="a").tensors == 1
    assert not list(tmp_path.glob("numpy.pt*"))


# ---------------------------------------------------------------- import, rechunk


def test_import_of_torch_and_back(tmp_path: Path) -> None:
    value = _odd()
    torch.save(value, tmp_path / "in.pt")
    told = run_json("import", tmp_path / "in.pt", tmp_path / "c", "--chunk-mib", 1)
    assert told["tensors"] == 12
    run_json("export", tmp_path / "c", tmp_path / "out.pt")
    _assert_same(torch.load(tmp_path / "out.pt", weights_only=True), value)
    into = {"model": {key: torch.zeros_like(each) for key, each in value["model"].items()}}
    dcp.load(into, storage_reader=FileSystemReader(tmp_path / "c"))  # stock reads it
    _assert_same(into["model"], value["model"])
    assert run("import", tmp_path / "in.pt", tmp_path / "c").exit_code == 2
    assert run("import", tmp_path / "in.pt", tmp_path / "c", "--overwrite").exit_code == 0


def test_import_refuses_what_it_cannot_read(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (tmp_path / "was here").mkdir, ()

    torch.save({"a": Evil()}, tmp_path / "evil.pt")
    torch.save({"a": 1}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    torch.save([torch.ones(1)], tmp_path / "list.pt")
    good = safetensors.torch.save({"a": torch.ones(100), "b": torch.ones(3, dtype=torch.uint8)})
    (tmp_path / "cut.safetensors").write_bytes(good[:-10])
    (tmp_path / "long.safetensors").write_bytes(struct.pack("<Q", 10**12) + good[8:])
    (tmp_path / "text").write_text("nothing")
    for name, said in (
        ("evil.pt", "weights_only=True"),
        ("old.pt", "zip format"),
        ("list.pt", "expected a state dict"),
        ("cut.safetensors", "cut off"),
        ("long.safetensors", "cut off"),
        ("text", "safetensors, or of torch.save"),
        ("absent", "No such file"),
    ):
        result = run("import", tmp_path / name, tmp_path / "c")
        assert result.exit_code in (1, 2) and said in result.output, (name, result.output)
    assert not (tmp_path / "c").exists() and not (tmp_path / "was here").exists()


def test_import_of_elements_that_are_not_aligned(tmp_path: Path) -> None:
    header = {
        "b": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "a": {"dtype": "F32", "shape": [2], "data_offsets": [3, 11]},
    }
    text = json.dumps(header).encode()
    data = bytes([1, 2, 3]) + struct.pack("<2f", 0.5, math.pi)
    (tmp_path / "odd.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    import_file(tmp_path / "odd.safetensors", tmp_path / "c")
    with Checkpoint(tmp_path / "c") as checkpoint:
        whole = checkpoint.read_box("a", Box((0,), (2,)))
    assert whole.tolist() == [0.5, torch.tensor(math.pi).item()]


@pytest.mark.parametrize("how", ["payload", "lost"])
def test_a_damaged_checkpoint_is_not_copied(run_folder: Path, tmp_path: Path, how: str) -> None:
    path = broken(run_folder / "ours", tmp_path / "broken", how)
    with Checkpoint(path) as checkpoint, pytest.raises(CorruptCheckpointError):
        rechunk(checkpoint, tmp_path / "copy")
    assert not list((tmp_path / "copy").glob("*")) and not list((tmp_path / "copy").glob(".*"))
    assert run("rechunk", path, tmp_path / "copy").exit_code == 1
    with Checkpoint(run_folder / "ours") as checkpoint:
        rechunk(checkpoint, tmp_path / "copy")
        with pytest.raises(StorageError, match="exists"):
            rechunk(checkpoint, tmp_path / "copy")


class Own:
    """An object of a class that no plain load takes."""

    def __init__(self, value: int) -> None:
        self.value = value


def test_objects_that_no_plain_load_takes(tmp_path: Path) -> None:
    """They are copied and compared as bytes; what would unpickle them is refused."""
    for name, value in (("one", 1), ("two", 2)):
        save({"own": Own(value), "a": torch.ones(2)}, tmp_path / name, "stock")
    with Checkpoint(tmp_path / "one") as checkpoint:
        rechunk(checkpoint, tmp_path / "copy")
    assert run("diff", tmp_path / "one", tmp_path / "copy").exit_code == 0
    (told,) = run_json("diff", tmp_path / "copy", tmp_path / "two", status=1)["differences"]
    assert told["key"] == "own" and "could run code" in told["what"]
    for result in (
        run("show", tmp_path / "one", "own"),
        run("export", tmp_path / "one", tmp_path / "out.pt"),
    ):
        assert result.exit_code == 2 and "Own" in result.output
    assert not list(tmp_path.glob("out.pt*"))


def test_turning_on_s3(s3: EmbeddedS3, run_folder: Path, tmp_path: Path) -> None:
    args = options(s3)
    url = upload(run_folder, s3, "turn")
    there = s3.url("turned")
    for kind in KINDS:
        assert run("diff", run_folder / kind, f"{url}/{kind}", *args).exit_code == 0
        assert run("export", f"{url}/{kind}", tmp_path / f"{kind}.pt", *args).exit_code == 0
        assert run("rechunk", f"{url}/{kind}", f"{there}/{kind}", *args).exit_code == 0
    assert run("import", tmp_path / "ours.pt", f"{there}/back", *args).exit_code == 0
    assert run("rechunk", f"{there}/back", tmp_path / "back", *args).exit_code == 0
    assert run("diff", f"{there}/stock", tmp_path / "back", *args).exit_code == 0
