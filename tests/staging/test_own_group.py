"""Asynchronous saves on a thread, over the group that training uses: refused before they begin."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from dcp_fsdp_osd import (
    FlatModelState,
    FlatOptimSavePlanner,
    FlatOptimState,
    FlatStager,
    StreamingWriter,
)
from tests.planners.checks import load, make
from tests.ranks import run_ranks
from tests.torch_gaps import HAS_STAGERS, async_save


def _saves(rank: int, world: int, path: str) -> None:
    model, optim = make(steps=1)
    both = {"model": FlatModelState(model), "optim": FlatOptimState(model, optim)}
    own = dist.new_group(backend="gloo")
    stager: dict[str, Any] = {"async_stager": FlatStager()} if HAS_STAGERS else {}

    def save(number: int, state: dict[str, Any], **options: Any) -> Any:
        writer = StreamingWriter(f"{path}/{number}", fsync=False)
        planner = FlatOptimSavePlanner(model, optim)
        return async_save(state, storage_writer=writer, planner=planner, kind="thread", **options)

    refused: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"optim": both["optim"]}, {}),
        ({"model": both["model"]}, {"process_group": dist.group.WORLD}),
    ]
    if stager:
        refused.append(({"optim": optim.state_dict()}, stager))
    for number, (state, options) in enumerate(refused):
        with pytest.raises(ValueError, match=r"process_group=dist.new_group\(backend='gloo'\)"):
            save(number, state, **options)
        # Nothing is under way: what training sends now meets nothing else.
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == world
    save(9, both, process_group=own, **stager).result()
    load(*make(steps=0), f"{path}/9")
    both["optim"].state_dict()  # by itself it is no save


@pytest.mark.parametrize("world", [2, 1])
def test_the_group_of_training_is_refused(tmp_path: Any, world: int) -> None:
    if world == 1:  # nobody's messages to mix with
        run_ranks(_alone, 1, str(tmp_path))
    else:
        run_ranks(_saves, world, str(tmp_path))


def _alone(rank: int, world: int, path: str) -> None:
    model, optim = make(steps=1)
    writer = StreamingWriter(path, fsync=False)
    state = {"optim": FlatOptimState(model, optim)}
    planner = FlatOptimSavePlanner()
    async_save(state, storage_writer=writer, planner=planner, kind="thread").result()
    load(*make(steps=0), path)
