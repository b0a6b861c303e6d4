"""Ranks that find different checkpoints raise, all of them, before a tensor is touched."""

from __future__ import annotations

import copy
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException

from dcp_fsdp_osd import (
    FlatOptimLoadPlanner,
    FlatOptimSavePlanner,
    StreamingReader,
    StreamingWriter,
    latest,
    verify_optim_state,
)
from tests.models import train_steps
from tests.planners.checks import assert_same, make
from tests.ranks import run_ranks


def _without_id(path: Path) -> None:
    """The metadata as torch before 2.3 wrote it."""
    file = path / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    metadata.storage_meta = None
    file.write_bytes(pickle.dumps(metadata))


def _attempt(load: Callable[[], Any]) -> str:
    """The text of the refusal, the same for each rank; "loaded" where there is none."""
    try:
        load()
    except CheckpointException as error:
        texts = {f"{type(e).__name__}: {e}" for e, _ in error.failures.values()}
        return "\n".join(sorted(texts))
    return "loaded"


def _different(rank: int, world: int, folder: str) -> dict[str, str]:
    root = Path(folder)
    model, optim = make()
    for step in (2, 3):
        train_steps(model, optim, 1)
        for kind, writer in (("ours", StreamingWriter), ("stock", FileSystemWriter)):
            dcp.save(
                {"optim": optim.state_dict(), "step": step},
                storage_writer=writer(root / kind / f"step-{step}"),
                planner=FlatOptimSavePlanner(model, optim),
            )
    if rank == 0:
        for step in (2, 3):
            shutil.copytree(root / "stock" / f"step-{step}", root / "old" / f"step-{step}")
            _without_id(root / "old" / f"step-{step}")
            (root / "copy").mkdir(exist_ok=True)
            shutil.copytree(root / "ours" / f"step-{step}", root / "copy" / f"step-{step}")
        # Another layout's checkpoint of the same state.
        shutil.copytree(root / "old" / "step-3", root / "other" / "step-3")
        file = root / "other" / "step-3" / ".metadata"
        metadata = pickle.loads(file.read_bytes())
        for info in metadata.storage_data.values():
            info.offset += 1
        file.write_bytes(pickle.dumps(metadata))
    dist.barrier()
    mine = f"step-{2 if rank == 0 else 3}"
    found: dict[str, str] = {}

    def check(name: str, reader: Any, planner: str) -> None:
        before = copy.deepcopy(optim.state_dict())
        if planner == "ours":
            state: dict[str, Any] = {"optim": optim.state_dict()}
            ours = FlatOptimLoadPlanner(model, optim)
            found[name] = _attempt(lambda: dcp.load(state, storage_reader=reader, planner=ours))
        elif planner == "verify":
            found[name] = _attempt(lambda: verify_optim_state(model, optim, reader))
        else:
            state = {"step": -1}
            found[name] = _attempt(lambda: dcp.load(state, storage_reader=reader))
            assert state == {"step": -1} or found[name] == "loaded"
        if found[name] != "loaded":
            assert_same(optim.state_dict(), before)

    check("ours", StreamingReader(root / "ours" / mine), "ours")
    check("our reader, stock's planner", StreamingReader(root / "ours" / mine), "stock")
    check("stock's reader", FileSystemReader(root / "stock" / mine), "ours")
    check("stock's checkpoint, our reader", StreamingReader(root / "stock" / mine), "stock")
    check("verify", FileSystemReader(root / "stock" / mine), "verify")
    elsewhere = root / ("other" if rank == 1 else "old") / "step-3"
    check("no ids", FileSystemReader(elsewhere), "ours")
    check("no ids, our reader", StreamingReader(elsewhere), "stock")
    # One save, which each rank finds at a place of its own.
    places = root / ("ours" if rank == 0 else "copy") / "step-3"
    check("copies", StreamingReader(places), "ours")
    check("copies, stock's reader", FileSystemReader(places), "ours")
    check("one without an id", FileSystemReader(root / "old" / "step-3"), "ours")
    return found


def test_ranks_that_load_different_checkpoints(tmp_path: Path) -> None:
    results = run_ranks(_different, 2, str(tmp_path), timeout=120)
    assert results[0] == results[1]
    loaded = {name for name, text in results[0].items() if text == "loaded"}
    assert loaded == {"copies", "copies, stock's reader", "one without an id"}
    for name, text in results[0].items():
        if name not in loaded:
            assert text.startswith("CheckpointMismatchError: the ranks do not load the same"), text
            assert "rank 0: save" in text and "rank 1: save" in text, text
    for name in ("ours", "our reader, stock's planner", "stock's reader"):
        assert "step-2\n" in results[0][name] and "step-3\n" in results[0][name], results[0][name]


def _one_answer(rank: int, world: int, folder: str) -> tuple[str | None, str | None]:
    """A folder of its own on each machine, and an empty one."""
    group = dist.group.WORLD
    found = latest(f"{folder}/{rank}", process_group=group)
    return found, latest(f"{folder}/new", process_group=group)


def test_latest_gives_all_ranks_one_answer(tmp_path: Path) -> None:
    for rank, steps in enumerate(((20,), (20, 30))):
        for step in steps:
            dcp.save(
                {"t": torch.ones(1)},
                storage_writer=StreamingWriter(tmp_path / f"{rank}/step-{step}"),
                no_dist=True,
            )
    (tmp_path / "new").mkdir()
    found = run_ranks(_one_answer, 2, str(tmp_path))
    assert found == [(f"{tmp_path}/{rank}/step-20", None) for rank in range(2)]


def _for_themselves(rank: int, world: int, folder: str) -> None:
    """Metadata of each rank's own: different saves, and nothing that can be read once for all."""
    model, _ = make()
    state = {"t": torch.full((10,), float(rank)), "n": rank}
    for kind, writer in (("ours", StreamingWriter), ("stock", FileSystemWriter)):
        path = f"{folder}/{kind}"
        dcp.save(dict(state), storage_writer=writer(path), use_collectives=False)
        for reader in (StreamingReader(path), FileSystemReader(path)):
            found: dict[str, Any] = {"t": torch.zeros(10), "n": -1}
            planner = FlatOptimLoadPlanner(model, {}, broadcast=True)
            dcp.load(found, storage_reader=reader, planner=planner)
            assert_same(found, state)


def test_ranks_with_metadata_of_their_own(tmp_path: Path) -> None:
    run_ranks(_for_themselves, 2, str(tmp_path))
