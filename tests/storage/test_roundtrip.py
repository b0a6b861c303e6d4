"""What is written is what is read, over every store and against stock DCP in both directions."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

from dcp_fsdp_osd.storage import StreamingReader, StreamingWriter, latest
from dcp_fsdp_osd.storage.memory import is_plain
from tests.storage.conftest import Place
from tests.storage.states import BoxPlanner, assert_same, load, mixed
from tests.torch_gaps import stock_fsspec

pytestmark = pytest.mark.filterwarnings("ignore")  # DCP warns that there is no process group


@pytest.mark.parametrize("checksum", [True, False])
def test_saved_and_loaded(place: Place, checksum: bool) -> None:
    state = mixed()
    writer = place.writer(checksum=checksum)
    dcp.save(state, storage_writer=writer)
    for verify in (True, False):
        reader = place.reader(verify=verify)
        assert_same(load(reader, state), state)
        assert reader.stats.bytes <= 1.15 * reader.stats.needed
    assert not place.uploads()


def test_large_files_and_many_parts(place: Place) -> None:
    state = {"large": torch.arange(3_500_000), "other": torch.arange(3_000_000).view(3, -1).t()}
    part = {} if place.endpoint else {"part_size": 1 << 18}
    dcp.save(state, storage_writer=place.writer(max_inflight_bytes=48 << 20, **part))
    assert_same(load(place.reader(max_inflight_bytes=4 << 20), state), state)


def test_stock_reads_ours(place: Place) -> None:
    state = mixed()
    dcp.save(state, storage_writer=place.writer())
    if place.kind == "local":
        stock: Any = FileSystemReader(place.url)
    elif place.kind == "obstore":
        stock = stock_fsspec(FsspecReader, place.url, **place.endpoint.storage_options)
    else:
        stock = stock_fsspec(FsspecReader, place.url, **place.options)
    assert_same(load(stock, state), state)


def test_ours_reads_stock(place: Place) -> None:
    state = mixed()
    if place.kind == "local":
        stock: Any = FileSystemWriter(place.url)
    elif place.kind == "obstore":
        stock = stock_fsspec(FsspecWriter, place.url, **place.endpoint.storage_options)
    else:
        stock = stock_fsspec(FsspecWriter, place.url, **place.options)
    dcp.save(state, storage_writer=stock)
    assert_same(load(place.reader(), state), state)


@pytest.mark.parametrize("writer", [StreamingWriter, FileSystemWriter])
@pytest.mark.parametrize("shape", [(4000,), (60, 70), (7, 1, 9, 11), (3000, 40)])
def test_boxes(tmp_path: Path, writer: Any, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)
    dcp.save({"t": tensor}, storage_writer=writer(tmp_path / "c"))
    generator = torch.Generator().manual_seed(len(shape))
    boxes = []
    for _ in range(12):
        offsets = [int(torch.randint(0, n, (), generator=generator)) for n in shape]
        lengths = [
            int(torch.randint(0, n - o + 1, (), generator=generator))
            for n, o in zip(shape, offsets, strict=True)
        ]
        boxes.append((offsets, lengths))
    makes = (
        lambda lengths: torch.zeros(lengths, dtype=torch.float64),
        lambda lengths: torch.zeros(lengths, dtype=torch.float32),
        lambda lengths: torch.zeros(lengths[::-1], dtype=torch.float64).permute(
            *reversed(range(len(lengths)))
        ),
    )
    for make, verify in itertools.product(makes, (True, False)):
        planner = BoxPlanner("t", boxes, make)
        reader = StreamingReader(tmp_path / "c", verify=verify)
        dcp.load({}, storage_reader=reader, planner=planner)
        assert sorted(planner.committed) == list(range(len(boxes)))
        for (offsets, lengths), found in zip(boxes, planner.found, strict=True):
            slices = tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))
            assert torch.equal(found.double(), tensor[slices])
        # No byte twice: overlapping boxes share what was read, and blocks.
        file_size = max(p.stat().st_size for p in (tmp_path / "c").glob("*.distcp"))
        metadata_size = (tmp_path / "c" / ".metadata").stat().st_size
        slack = 0 if writer is StreamingWriter else 6 << 10
        assert reader.stats.bytes <= file_size + metadata_size + slack


def test_part_of_an_entry_reads_few_bytes(tmp_path: Path) -> None:
    tensor = torch.arange(8 << 20, dtype=torch.float32).view(-1, 1024)
    dcp.save({"t": tensor}, storage_writer=StreamingWriter(tmp_path / "c"))
    # Cut in uneven thirds: each part reads at most one block more at each cut.
    cuts = [0, 2731, 5461, len(tensor)]
    read = 0
    for start, end in itertools.pairwise(cuts):
        planner = BoxPlanner("t", [((start, 0), (end - start, 1024))])
        reader = StreamingReader(tmp_path / "c")
        dcp.load({}, storage_reader=reader, planner=planner)
        assert torch.equal(planner.found[0], tensor[start:end])
        read += reader.stats.bytes
    assert read <= 1.02 * tensor.nbytes


def test_scalars_take_few_requests(place: Place) -> None:
    state = {f"step.{i}": torch.tensor(float(i)) for i in range(500)}
    state |= {f"option.{i}": i for i in range(100)}
    dcp.save(state, storage_writer=place.writer())
    reader = place.reader()
    assert_same(load(reader, state), state)
    assert reader.stats.requests <= 3


def test_overwrite(place: Place) -> None:
    state = mixed()
    dcp.save(state, storage_writer=place.writer())
    old = place.store().sizes()
    with pytest.raises(CheckpointException, match="already exists"):
        dcp.save(state, storage_writer=place.writer())
    assert place.store().sizes() == old
    state["large"] = state["large"] + 1
    dcp.save(state, storage_writer=place.writer(overwrite=True))
    new = place.store().sizes()
    assert set(new) & set(old) == {".metadata"}
    assert_same(load(place.reader(), state), state)


def test_a_writer_saves_again_elsewhere(tmp_path: Path) -> None:
    writer = StreamingWriter(tmp_path / "a")
    state = {"t": torch.arange(10)}
    dcp.save(state, storage_writer=writer)
    state["t"] += 1
    dcp.save(state, storage_writer=writer, checkpoint_id=tmp_path / "b")
    reader = StreamingReader()
    found = {"t": torch.zeros(10, dtype=torch.int64)}
    dcp.load(found, storage_reader=reader, checkpoint_id=tmp_path / "b")
    assert_same(found, state)
    assert reader.checkpoint_id == str(tmp_path / "b")


def test_plan_caching_does_not_reuse_names(tmp_path: Path) -> None:
    """A cached plan carries an earlier save's id; the new files must have names of their own."""
    writer = StreamingWriter(tmp_path / "c", overwrite=True)
    state = {"t": torch.arange(10)}
    names = []
    for _ in range(3):
        state["t"] += 1
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state, storage_writer=writer, planner=planner)
        names += [path.name for path in (tmp_path / "c").glob("*.distcp")]
        assert_same(load(StreamingReader(tmp_path / "c"), state), state)
    assert len(set(names)) == 3


def test_latest(place: Place) -> None:
    dcp.save({"t": torch.arange(3)}, storage_writer=place.below("unfinished").writer())
    place.below("unfinished").store().delete([".metadata"])
    assert latest(place.url, **place.arguments) is None
    for name in ("step-20", "step-100"):
        dcp.save({"t": torch.arange(3)}, storage_writer=place.below(name).writer())
    found = latest(place.url, **place.arguments)
    # Written within one second of each other: the name decides.
    assert found == f"{place.url}/step-100"
    assert_same(
        load(place.below("step-100").reader(), {"t": torch.arange(3)})["t"].sum(), torch.tensor(3)
    )


def test_one_process_without_collectives(tmp_path: Path) -> None:
    state = mixed()
    dcp.save(state, storage_writer=StreamingWriter(tmp_path / "c"), use_collectives=False)
    assert (tmp_path / "c" / "__0.metadata").exists()
    assert_same(load(StreamingReader(tmp_path / "c"), state), state)
    with pytest.raises(CheckpointException, match="already exists"):
        dcp.save(state, storage_writer=StreamingWriter(tmp_path / "c"))


def test_nothing_to_save(place: Place) -> None:
    dcp.save({}, storage_writer=place.writer())
    dcp.load({}, storage_reader=place.reader())


def test_in_place_and_other_dtype(tmp_path: Path) -> None:
    state = {"t": torch.randn(100, 30)}
    dcp.save(state, storage_writer=StreamingWriter(tmp_path / "c"))
    target = torch.zeros(100, 30)
    where = target.data_ptr()
    dcp.load({"t": target}, storage_reader=StreamingReader(tmp_path / "c"))
    assert target.data_ptr() == where
    assert_same(target, state["t"])
    half = {"t": torch.zeros(100, 30, dtype=torch.float16)}
    dcp.load(half, storage_reader=StreamingReader(tmp_path / "c"))
    assert_same(half["t"], state["t"].half())


class _Doubled(dcp.DefaultSavePlanner):
    """Resolves a tensor subclass, which holds more than its elements' bytes."""

    def resolve_data(self, write_item: Any) -> Any:
        data = super().resolve_data(write_item)
        return data.as_subclass(_Named)


class _Named(torch.Tensor):
    pass


def test_subclass_goes_through_torch_save(tmp_path: Path) -> None:
    state = {"t": torch.randn(20, 30)}
    assert not is_plain(state["t"].as_subclass(_Named))
    assert not is_plain(torch.eye(5).to_sparse())
    dcp.save(state, storage_writer=StreamingWriter(tmp_path / "c"), planner=_Doubled())
    with pytest.raises(CheckpointException, match="_Named"):
        load(StreamingReader(tmp_path / "c"), state)
    assert_same(load(StreamingReader(tmp_path / "c", allow_pickle=True), state), state)


def test_writer_is_picklable_before_and_after_use(place: Place) -> None:
    writer = pickle.loads(pickle.dumps(place.writer()))
    dcp.save({"t": torch.arange(3)}, storage_writer=writer)
    again = pickle.loads(pickle.dumps(writer))
    assert again.stats == writer.stats
    assert "secret" not in repr(writer._session)


def test_async_save_on_a_thread(tmp_path: Path) -> None:
    state = mixed()
    del state["conjugate"]  # torch's stager drops the conjugate bit
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for number in range(2):
            future = dcp.async_save(state, storage_writer=StreamingWriter(tmp_path / str(number)))
            future.result(timeout=60)
    finally:
        dist.destroy_process_group()
    assert_same(load(StreamingReader(tmp_path / "1"), state), state)
