"""One flipped bit, anywhere in a checkpoint, is an error on load and never a silent one.

The offsets are random but seeded.  There are few bytes in headers, trailers and scalars beside the
payload of one matrix, so half of the flips in data files go to a checkpoint of small entries alone.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from dcp_fsdp_osd.errors import CorruptCheckpointError, FlatOptimError
from dcp_fsdp_osd.storage import StreamingReader, StreamingWriter

pytestmark = pytest.mark.filterwarnings("ignore")  # DCP warns that there is no process group

State = dict[str, Any]
FLIPS = {"large": 70, "small": 70, "metadata": 60}


def _large() -> State:
    generator = torch.Generator().manual_seed(1)
    return {
        "matrix": torch.randn(1000, 513, generator=generator),
        "bf16": torch.randn(300, 700, generator=generator).to(torch.bfloat16),
        "strided": torch.randn(200, 300, generator=generator).t(),
    }


def _small() -> State:
    return {
        **{f"state.{i}.step": torch.tensor(float(i)) for i in range(20)},
        **{f"state.{i}.exp_avg": torch.arange(i, i + 5, dtype=torch.float64) for i in range(10)},
        "mask": torch.tensor([True, False, True]),
        "group": {"lr": 0.25, "betas": [0.9, 0.95], "params": ["a.weight", "b.bias"]},
        "epoch": 7,
        "name": "flat",
        "nothing": None,
    }


STATES: dict[str, Callable[[], State]] = {"large": _large, "small": _small}


def _blank(state: Any) -> Any:
    """The same structure with other values, to load into."""
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    if isinstance(state, dict):
        return {key: _blank(value) for key, value in state.items()}
    if isinstance(state, list):
        return [_blank(value) for value in state]
    return type(state)() if state is not None else None


def _same(left: Any, right: Any) -> bool:
    """Equal to the bit, structure and types included."""
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_same(left[k], right[k]) for k in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(_same, left, right))
    return type(left) is type(right) and left == right


def _load(folder: Path, like: State, **options: Any) -> State:
    found = _blank(like)
    dcp.load(found, storage_reader=StreamingReader(folder, **options))
    return found


def _causes(error: BaseException) -> list[BaseException]:
    """The errors that DCP's CheckpointException holds."""
    assert isinstance(error, CheckpointException)
    return [failure[0] for failure in error.failures.values()]


def _is_ours(cause: BaseException) -> bool:
    """Whether the error is one of this package's: itself, or quoted by DCP.

    When reading the metadata fails, DCP raises an AssertionError of its own that quotes the error.
    """
    quoted = "global metadata read failed: " in str(cause) and ".metadata: " in str(cause)
    return isinstance(cause, FlatOptimError) or quoted


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for name, make in STATES.items():
        folders[name] = tmp_path_factory.mktemp(name) / "checkpoint"
        dcp.save(make(), storage_writer=StreamingWriter(folders[name]))
        assert _same(_load(folders[name], make()), make())
    return folders


def _flips(folders: dict[str, Path], part: str) -> list[tuple[str, Path, int, int]]:
    """(checkpoint, file, offset, bit) of this part's flips, spread evenly over the files' bytes."""
    chosen = random.Random(f"bitflip-{part}")
    spans: list[tuple[str, Path, int]] = []
    for name, folder in folders.items():
        if part in (name, "metadata"):
            for file in sorted(folder.iterdir()):
                if (file.name == ".metadata") == (part == "metadata"):
                    spans.append((name, file, file.stat().st_size))
    flips = []
    for _ in range(FLIPS[part]):
        name, file, size = chosen.choices(spans, weights=[size for _, _, size in spans])[0]
        flips.append((name, file, chosen.randrange(size), chosen.randrange(8)))
    return flips


class _Flipped:
    """A file with one bit the other way round, until the block is left."""

    def __init__(self, file: Path, offset: int, bit: int) -> None:
        self.file, self.offset, self.bit = file, offset, bit

    def _flip(self) -> None:
        with self.file.open("r+b") as file:
            file.seek(self.offset)
            byte = file.read(1)[0]
            file.seek(self.offset)
            file.write(bytes([byte ^ (1 << self.bit)]))

    def __enter__(self) -> None:
        self._flip()

    def __exit__(self, *exc: object) -> None:
        self._flip()


@pytest.mark.parametrize("part", list(FLIPS))
def test_a_flipped_bit_is_an_error(checkpoints: dict[str, Path], part: str) -> None:
    silent, untyped = [], []
    for name, file, offset, bit in _flips(checkpoints, part):
        where = f"{name}/{file.name} offset {offset} bit {bit}"
        with _Flipped(file, offset, bit):
            try:
                found = _load(checkpoints[name], STATES[name]())
            except CheckpointException as error:
                untyped += [
                    f"{where}: {cause!r}" for cause in _causes(error) if not _is_ours(cause)
                ]
            else:
                same = _same(found, STATES[name]())
                silent.append(f"{where}: loaded, state {'unchanged' if same else 'CHANGED'}")
    assert not silent
    assert not untyped
    # The flips were undone, so it was they that made the errors.
    for name, folder in checkpoints.items():
        assert _same(_load(folder, STATES[name]()), STATES[name]())


def test_without_verify_the_same_flips_do_change_the_state(checkpoints: dict[str, Path]) -> None:
    """The flips above lie in bytes that matter: it is the checksums that find them."""
    changed = 0
    for name, file, offset, bit in _flips(checkpoints, "large"):
        with _Flipped(file, offset, bit):
            found = _load(checkpoints[name], STATES[name](), verify=False)
            changed += not _same(found, STATES[name]())
    assert changed > FLIPS["large"] * 0.9


@pytest.fixture
def half_planner() -> Iterator[type[dcp.DefaultLoadPlanner]]:
    """A planner that asks for some rows of each matrix, as another layout's rank would."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

    class HalfPlanner(dcp.DefaultLoadPlanner):
        def create_local_plan(self) -> LoadPlan:
            plan = super().create_local_plan()
            items = []
            for item in plan.items:
                entry = self.metadata.state_dict_metadata[item.dest_index.fqn]
                if item.type is LoadItemType.TENSOR and isinstance(entry, TensorStorageMetadata):
                    rows, columns = item.lengths
                    begin, end = rows // 5, rows // 2
                    items.append(
                        ReadItem(
                            type=item.type,
                            dest_index=item.dest_index,
                            dest_offsets=torch.Size([begin, 0]),
                            storage_index=item.storage_index,
                            storage_offsets=torch.Size([begin, 0]),
                            lengths=torch.Size([end - begin, columns]),
                        )
                    )
            return LoadPlan(items)

    yield HalfPlanner


def test_reading_in_part_is_right_or_an_error(
    checkpoints: dict[str, Path], half_planner: type[dcp.DefaultLoadPlanner]
) -> None:
    """A part of an entry is read and checked without the rest, so a flip elsewhere is not seen."""

    def load_half() -> State:
        found = _blank(_large())
        reader = StreamingReader(checkpoints["large"])
        dcp.load(found, storage_reader=reader, planner=half_planner())
        return found

    expected = _blank(_large())
    for name, tensor in _large().items():
        rows = slice(len(tensor) // 5, len(tensor) // 2)
        expected[name][rows] = tensor[rows]
    assert _same(load_half(), expected)
    errors = 0
    for name, file, offset, bit in _flips(checkpoints, "large"):
        assert name == "large"
        with _Flipped(file, offset, bit):
            try:
                found = load_half()
            except CheckpointException:
                errors += 1
            else:
                assert _same(found, expected), f"{file.name} offset {offset} bit {bit}"
    # 0.3 of the rows are read: the others must not have been, nor every flip be missed.
    assert FLIPS["large"] * 0.15 < errors < FLIPS["large"] * 0.9


def test_the_error_says_where(checkpoints: dict[str, Path]) -> None:
    """File, FQN, entry, the bytes of the block and rank are named."""
    folder = checkpoints["large"]
    file = max(folder.iterdir(), key=lambda each: each.stat().st_size)
    flipped = file.stat().st_size // 2
    with _Flipped(file, flipped, 3), pytest.raises(CheckpointException) as raised:
        _load(folder, _large())
    (cause,) = _causes(raised.value)
    assert isinstance(cause, CorruptCheckpointError)
    text = str(cause)
    assert file.name in text
    assert "rank 0" in text
    index, info = next(
        (index, info)
        for index, info in StreamingReader(folder).read_metadata().storage_data.items()
        if info.relative_path == file.name and 0 <= flipped - info.offset < info.length
    )
    assert f"{index.fqn} (entry at byte {info.offset}, {info.length} bytes)" in text
    found = re.search(r"mismatch in the payload bytes (\d+) to (\d+): expected", text)
    at = flipped - info.offset - info.dcp_fsdp_osd[2]  # in the payload
    assert found is not None and int(found[1]) <= at < int(found[2])


def test_an_empty_tensor_is_never_read(tmp_path: Path) -> None:
    """The one kind of byte that no check covers: DCP asks for no entry without elements."""
    state = {"empty": torch.zeros(0, 3, dtype=torch.float16)}
    folder = tmp_path / "checkpoint"
    dcp.save(state, storage_writer=StreamingWriter(folder))
    (file,) = folder.glob("*.distcp")
    for offset in range(0, file.stat().st_size, 37):
        with _Flipped(file, offset, offset % 8):
            assert _same(_load(folder, state), state)


@pytest.mark.parametrize("cut", [1, 100, 10**9])
@pytest.mark.parametrize("part", ["data", "metadata"])
def test_a_cut_file_is_an_error(tmp_path: Path, part: str, cut: int) -> None:
    folder = tmp_path / "checkpoint"
    dcp.save(_small(), storage_writer=StreamingWriter(folder))
    for file in sorted(folder.iterdir()):
        if (file.name == ".metadata") == (part == "metadata"):
            whole = file.read_bytes()
            file.write_bytes(whole[: max(0, len(whole) - cut)])
            with pytest.raises(CheckpointException) as raised:
                _load(folder, _small())
            assert all(map(_is_ours, _causes(raised.value)))
            file.write_bytes(whole)
    assert _same(_load(folder, _small()), _small())
