"""Several ranks: one checkpoint, one error for all, and metadata read once."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dcp_fsdp_osd.storage import StreamingReader, StreamingWriter
from tests.ranks import RankError, run_ranks
from tests.storage.fakes import Script
from tests.storage.states import assert_same, mixed
from tests.torch_gaps import (
    async_kinds,
    async_save,
    needs_groups_without_rank_0,
    needs_save_without_collectives,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # DCP warns that there is no process group

ROWS, COLUMNS = 1001, 65


def _full() -> torch.Tensor:
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS)


def _sharded(world_size: int, full: torch.Tensor, dim: int = 0) -> Any:
    mesh = init_device_mesh("cpu", (world_size,))
    return distribute_tensor(full, mesh, [Shard(dim)])


def _save(rank: int, world_size: int, path: str) -> None:
    state = {"w": _sharded(world_size, _full()), "step": torch.tensor(5.0), "lr": 0.1}
    writer = StreamingWriter(path, fsync=False)
    dcp.save(state, storage_writer=writer)
    assert writer.stats.bytes > 0


def _load(rank: int, world_size: int, path: str, dim: int, once: bool) -> tuple[int, int]:
    script = Script()
    reader = StreamingReader(
        path, backend=script.store, process_group=dist.group.WORLD if once else None
    )
    state = {
        "w": _sharded(world_size, torch.zeros(ROWS, COLUMNS), dim),
        "step": torch.tensor(0.0),
        "lr": 0.0,
    }
    dcp.load(state, storage_reader=reader)
    expected = _sharded(world_size, _full(), dim)
    assert torch.equal(state["w"].to_local(), expected.to_local())
    assert state["step"] == 5 and state["lr"] == 0.1
    return script.count("read whole"), reader.stats.bytes


@pytest.mark.parametrize("save_on", [1, 3])
def test_resharded(tmp_path: Path, save_on: int) -> None:
    run_ranks(_save, save_on, str(tmp_path / "c"))
    # One file a rank, all of them of one save.
    names = sorted(p.name for p in (tmp_path / "c").glob("*.distcp"))
    assert [name[:5] for name in names] == [f"__{rank}_0" for rank in range(save_on)]
    assert len({name[6:] for name in names}) == 1
    for load_on, dim, once in ((2, 0, True), (2, 1, False), (4, 0, False)):
        found = run_ranks(_load, load_on, str(tmp_path / "c"), dim, once)
        assert [count for count, _ in found] == ([1, 0] if once else [1] * load_on)
    stock = {"w": torch.zeros(ROWS, COLUMNS)}
    dcp.load(stock, storage_reader=FileSystemReader(tmp_path / "c"))
    assert torch.equal(stock["w"], _full())


def _fail_to_write(rank: int, world_size: int, path: str, late: bool) -> None:
    """Rank 1 fails; with `late` only after rank 0 has written all of its part."""

    class Planner(dcp.DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            if rank == 1:
                if late:
                    dist.barrier()
                raise ValueError("rank 1 has no data")
            return super().resolve_data(write_item)

    def after(operation: str, name: str) -> None:
        if operation == "complete" and late:
            dist.barrier()

    script = Script(after=after)
    writer = StreamingWriter(path, backend=script.store, fsync=False)
    dcp.save({"w": _sharded(world_size, _full())}, storage_writer=writer, planner=Planner())


@pytest.mark.parametrize("late", [False, True])
def test_a_rank_that_fails_to_write(tmp_path: Path, late: bool) -> None:
    with pytest.raises(RankError) as error:
        run_ranks(_fail_to_write, 2, str(tmp_path / "c"), late, timeout=60)
    assert error.value.all_raised("CheckpointException")
    assert "rank 1 has no data" in str(error.value)
    left = {p.name for p in (tmp_path / "c").iterdir()}
    # Nothing but the empty note that told the other rank, which the next save takes away.
    assert all(name.endswith(".aborted") for name in left), left
    run_ranks(_save, 2, str(tmp_path / "c"))
    assert len(list((tmp_path / "c").iterdir())) == 3
    run_ranks(_load, 2, str(tmp_path / "c"), 0, True)


class _LockedError(FileExistsError):
    """Cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("locked")
        self.lock = threading.Lock()


def _fail_with_a_lock(rank: int, world_size: int, path: str, operation: str) -> None:
    def before(called: str, name: str) -> None:
        if rank == 1 and called == operation:
            raise _LockedError

    script = Script(before=before)
    state = {"w": _sharded(world_size, _full())}
    try:
        if operation == "read":
            dcp.load(state, storage_reader=StreamingReader(path, backend=script.store))
        else:
            dcp.save(state, storage_writer=StreamingWriter(path, backend=script.store))
    except CheckpointException as error:
        assert list(error.failures) == [1]
        raise


@pytest.mark.parametrize("operation", ["read", "write"])
def test_an_error_that_cannot_be_pickled_hangs_nobody(tmp_path: Path, operation: str) -> None:
    if operation == "read":
        run_ranks(_save, 2, str(tmp_path / "c"))
    with pytest.raises(RankError) as error:
        run_ranks(_fail_with_a_lock, 2, str(tmp_path / "c"), operation, timeout=60)
    assert error.value.all_raised("CheckpointException")
    assert "_LockedError: locked" in str(error.value)


def _refused(rank: int, world_size: int, path: str) -> None:
    dcp.save({"w": _sharded(world_size, _full())}, storage_writer=StreamingWriter(path))


def test_an_existing_checkpoint_is_an_error_on_every_rank(tmp_path: Path) -> None:
    run_ranks(_save, 2, str(tmp_path / "c"))
    with pytest.raises(RankError) as error:
        run_ranks(_refused, 2, str(tmp_path / "c"), timeout=60)
    assert error.value.all_raised("StorageError")


def _load_nothing(rank: int, world_size: int, path: str) -> None:
    try:
        dcp.load(
            {"w": torch.zeros(1)},
            storage_reader=StreamingReader(path, process_group=dist.group.WORLD),
        )
    except CheckpointException as error:
        assert sorted(error.failures) == list(range(world_size))
        raise


@pytest.mark.parametrize("content", [None, b"garbage"])
def test_metadata_that_cannot_be_read_fails_on_every_rank(
    tmp_path: Path, content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(RankError) as error:
        run_ranks(_load_nothing, 3, str(tmp_path), timeout=60)
    assert error.value.all_raised("CheckpointException")
    assert ("no checkpoint at" if content is None else "not a pickle") in str(error.value)


def _load_in_a_subgroup(rank: int, world_size: int, path: str) -> int:
    group = dist.new_group([1, 2])
    if rank == 0:
        return -1
    script = Script()
    reader = StreamingReader(path, backend=script.store, process_group=group)
    state = {"step": torch.tensor(0.0)}
    dcp.load(state, storage_reader=reader, process_group=group)
    assert state["step"] == 5
    return script.count("read whole")


@needs_groups_without_rank_0
def test_a_load_in_a_subgroup_involves_nobody_else(tmp_path: Path) -> None:
    run_ranks(_save, 2, str(tmp_path / "c"))
    assert run_ranks(_load_in_a_subgroup, 3, str(tmp_path / "c"), timeout=60) == [-1, 1, 0]


def _without_collectives(rank: int, world_size: int, path: str) -> None:
    state = {"t": torch.full((10,), float(rank)), "n": rank}
    dcp.save(state, storage_writer=StreamingWriter(path), use_collectives=False)
    found = {"t": torch.zeros(10), "n": -1}
    dcp.load(found, storage_reader=StreamingReader(path))
    assert_same(found, state)


@needs_save_without_collectives
def test_ranks_that_save_for_themselves(tmp_path: Path) -> None:
    run_ranks(_without_collectives, 2, str(tmp_path / "c"))
    assert {p.name for p in (tmp_path / "c").glob("*.metadata")} == {"__0.metadata", "__1.metadata"}


def _async(rank: int, world_size: int, path: str, kind: str) -> None:
    state = mixed()
    del state["conjugate"]  # torch's stager drops the conjugate bit
    future = async_save(state, kind=kind, storage_writer=StreamingWriter(path, fsync=False))
    future.result(timeout=100)


@pytest.mark.slow  # as tests/staging, with stock's stager
@async_kinds
def test_async_save(tmp_path: Path, kind: str) -> None:
    run_ranks(_async, 2, str(tmp_path / "c"), kind, timeout=150)
    state = mixed()
    del state["conjugate"]
    found = {key: torch.zeros_like(value) for key, value in state.items() if key == "large"}
    dcp.load(found, storage_reader=StreamingReader(tmp_path / "c"))
    assert torch.equal(found["large"], state["large"])
