"""Saves and loads beside work that the caller's stream has yet to do: nothing moves too early, no
buffer is filled again before it is copied.

Each wait in ``storage/device.py``, ``storage/fetch.py`` and ``exchange/worker.py`` is needed by one
of these tests, on an accelerator that copies behind the host's back.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_fsdp_osd import FlatOptimLoadPlanner, StreamingReader, StreamingWriter
from tests.ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator"),
    pytest.mark.filterwarnings("ignore"),  # DCP warns that there is no process group
]

_NUMEL = 3 << 20
_INFLIGHT = 4 << 20  # a third of the bytes of one tensor: each buffer is used again and again


def _device() -> torch.device:
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return torch.device(found.type, 0)


@contextlib.contextmanager
def _own_stream() -> Iterator[None]:
    before = torch.accelerator.current_stream()
    torch.accelerator.set_stream(torch.Stream(_device()))
    try:
        yield
    finally:
        torch.accelerator.synchronize()
        torch.accelerator.set_stream(before)


def _keep_busy(seconds: float = 0.1) -> None:
    """Queue work for about so long on the current stream."""
    big, other = torch.zeros(2, 4 << 20, device=_device())
    torch.accelerator.synchronize()
    begin = time.perf_counter()
    big.copy_(other)
    torch.accelerator.synchronize()
    each = time.perf_counter() - begin
    for _ in range(min(max(int(seconds / each), 2), 20_000)):
        big.copy_(other)


class _FilledLate(dcp.DefaultSavePlanner):
    """What is saved is computed when it is asked for, and not yet there."""

    def __init__(self, values: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.values = values

    def resolve_data(self, write_item: Any) -> Any:
        found = super().resolve_data(write_item)
        _keep_busy()
        found.copy_(self.values[write_item.index.fqn])
        return found


class _SpoiledLate(dcp.DefaultLoadPlanner):
    """What is loaded into is written to just before, which is not yet done; and what was committed
    is used at once, as a planner that decodes does."""

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        found = super().resolve_tensor(read_item)
        _keep_busy()
        return found.fill_(7)

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        tensor.add_(1)


def _values(device: torch.device | str) -> dict[str, torch.Tensor]:
    numbers = torch.arange(_NUMEL, dtype=torch.float32)
    return {
        "flat": numbers.to(device),
        "small": (numbers[:100] + 0.5).to(device),
        "strided": numbers.view(-1, 1024).t().contiguous().to(device).t(),
        "half": numbers.half().to(device),
    }


def _like(device: torch.device | str) -> dict[str, torch.Tensor]:
    return {name: torch.full_like(value, -1) for name, value in _values(device).items()}


def _save(state: dict[str, torch.Tensor], path: str, planner: Any = None) -> None:
    writer = StreamingWriter(path, fsync=False, max_inflight_bytes=_INFLIGHT)
    dcp.save(dict(state), storage_writer=writer, planner=planner, no_dist=True)
    assert writer.stats.peak_inflight <= _INFLIGHT


def _same(found: dict[str, torch.Tensor], more: float = 0) -> None:
    for name, value in _values("cpu").items():
        assert torch.equal(found[name].cpu(), value + more), name


def test_a_save_comes_after_what_the_stream_was_given(tmp_path: Path) -> None:
    with _own_stream():
        state = _like(_device())
        _save(state, str(tmp_path / "checkpoint"), _FilledLate(_values(_device())))
        for value in state.values():
            value.fill_(7)
    found = _like("cpu")
    dcp.load(found, storage_reader=StreamingReader(tmp_path / "checkpoint"), no_dist=True)
    _same(found)


def test_a_load_comes_after_what_the_stream_was_given_and_before_what_comes(tmp_path: Path) -> None:
    _save(_values("cpu"), str(tmp_path))
    with _own_stream():
        state = _like(_device())
        torch.accelerator.synchronize()
        reader = StreamingReader(tmp_path, max_inflight_bytes=_INFLIGHT)
        dcp.load(state, storage_reader=reader, planner=_SpoiledLate(), no_dist=True)
        assert reader.stats.peak_inflight <= _INFLIGHT
        copies = {name: value.clone() for name, value in state.items()}
        for value in state.values():
            value.fill_(7)
    _same(copies, more=1)


def _shared(rank: int, world: int, path: str) -> None:
    with _own_stream():
        state = _like(_device())
        torch.accelerator.synchronize()
        _keep_busy()
        for value in state.values():
            value.fill_(7)
        planner = FlatOptimLoadPlanner(broadcast=True)
        dcp.load(state, storage_reader=StreamingReader(path), planner=planner)
        assert planner.exchanged is not None and planner.exchanged.sent + planner.exchanged.received
        copies = {name: value.clone() for name, value in state.items()}
    _same(copies)


def test_a_load_that_ranks_share(tmp_path: Path) -> None:
    _save(_values("cpu"), str(tmp_path))
    run_ranks(_shared, 2, str(tmp_path), timeout=120)
