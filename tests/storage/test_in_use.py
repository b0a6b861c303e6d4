"""One writer or reader for two saves or loads at once (two ``async_save`` that overlap): the second
is refused, the first ends where it began, and afterwards the object can be used again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from dcp_fsdp_osd import FullStateReader, StreamingReader, StreamingWriter

REFUSED = r"one save or load at a time, found that another thread"


class _Gate:
    """Where the first save or load waits until the second was tried."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def wait(self) -> None:
        self.reached.set()
        assert self.opened.wait(30)


class _SlowSave(DefaultSavePlanner):
    gate: _Gate
    error: Exception | None = None

    def resolve_data(self, write_item: Any) -> Any:
        self.gate.wait()
        if self.error is not None:
            raise self.error
        return super().resolve_data(write_item)


class _SlowLoad(DefaultLoadPlanner):
    gate: _Gate

    def resolve_tensor(self, read_item: Any) -> Any:
        self.gate.wait()
        return super().resolve_tensor(read_item)


@pytest.fixture
def gate() -> _Gate:
    return _Gate()


@pytest.fixture
def other() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def _state(value: float) -> dict[str, Any]:
    return {"weight": torch.full((1000,), value)}


def _save(writer: StreamingWriter, path: Path | None, value: float, planner: Any = None) -> None:
    save(_state(value), checkpoint_id=path, storage_writer=writer, planner=planner)


def _load(reader: Any, path: Path | None, planner: Any = None) -> torch.Tensor:
    state = _state(-1.0)
    load(state, checkpoint_id=path, storage_reader=reader, planner=planner)
    found: torch.Tensor = state["weight"]
    return found


def _is_refused(call: Callable[[], Any]) -> None:
    with pytest.raises(BaseException, match=REFUSED):  # CheckpointException is no Exception
        call()


@pytest.mark.parametrize("at_once", [True, False])
def test_one_writer(tmp_path: Path, gate: _Gate, other: ThreadPoolExecutor, at_once: bool) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    writer, planner = StreamingWriter(first), _SlowSave()
    planner.gate = gate
    saved = other.submit(_save, writer, first, 1.0, planner)
    assert gate.reached.wait(30)
    if at_once:
        _is_refused(lambda: _save(writer, second, 2.0))
        gate.opened.set()
        saved.result(30)
    else:  # the first ends when DCP has told the writer of the second's path and nothing more
        writer.reset(second)
        gate.opened.set()
        saved.result(30)
        _is_refused(lambda: _save(writer, None, 2.0))
    assert writer.checkpoint_id == str(first)
    assert not second.exists()
    assert (_load(StreamingReader(first), None) == 1.0).all()
    _save(writer, second, 2.0)
    assert (_load(StreamingReader(second), None) == 2.0).all()
    assert (_load(StreamingReader(first), None) == 1.0).all()


def test_a_path_that_another_save_has_replaced(tmp_path: Path, other: ThreadPoolExecutor) -> None:
    writer = StreamingWriter()
    other.submit(writer.reset, tmp_path / "first").result(30)
    writer.reset(tmp_path / "second")
    _is_refused(other.submit(_save, writer, None, 1.0).result)
    _save(writer, None, 2.0)
    assert (_load(StreamingReader(tmp_path / "second"), None) == 2.0).all()


def test_a_thread_goes_on_with_what_its_caller_has_reset(
    tmp_path: Path, other: ThreadPoolExecutor
) -> None:
    """As ``dcp.async_save`` of torch 2.6."""
    writer = StreamingWriter()
    of_dcp: dict[str, Any] = {"__name__": "torch.distributed.checkpoint.of_this_test"}
    exec("def in_dcp(*calls): [call() for call in calls]", of_dcp)
    saved = tmp_path / "saved"
    of_dcp["in_dcp"](
        lambda: writer.reset(saved),
        lambda: other.submit(_save, writer, saved, 1.0).result(30),
    )
    assert (_load(StreamingReader(saved), None) == 1.0).all()


def test_a_writer_whose_save_has_failed(
    tmp_path: Path, gate: _Gate, other: ThreadPoolExecutor
) -> None:
    writer, planner = StreamingWriter(tmp_path / "first"), _SlowSave()
    planner.gate, planner.error = gate, ValueError("of this test")
    gate.opened.set()
    failed = other.submit(_save, writer, None, 1.0, planner)
    kept = failed.exception(30)  # with all the frames of its traceback
    assert kept is not None
    _save(writer, None, 2.0)
    assert (_load(StreamingReader(tmp_path / "first"), None) == 2.0).all()


@pytest.mark.parametrize("kind", ["checkpoint", "file"])
def test_one_reader(tmp_path: Path, gate: _Gate, other: ThreadPoolExecutor, kind: str) -> None:
    paths = [tmp_path / "first", tmp_path / "second"]
    for value, path in enumerate(paths, start=1):
        if kind == "file":
            torch.save(_state(value), path)
        else:
            _save(StreamingWriter(path), None, value)
    reader: Any = (FullStateReader if kind == "file" else StreamingReader)(paths[0])
    planner = _SlowLoad()
    planner.gate = gate
    loaded = other.submit(_load, reader, paths[0], planner)
    assert gate.reached.wait(30)
    _is_refused(lambda: _load(reader, paths[1]))
    _is_refused(lambda: _load(reader, None))
    gate.opened.set()
    assert (loaded.result(30) == 1.0).all()
    assert (_load(reader, paths[1]) == 2.0).all()
