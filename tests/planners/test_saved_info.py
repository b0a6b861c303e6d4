"""What our planner records in the metadata: across versions of this package, and damaged."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from dcp_fsdp_osd import verify_optim_state
from dcp_fsdp_osd.checkpoint import INFO_KEY
from tests.planners.checks import assert_same, load, save

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

_FIRST = {"groups", "user", "absent", "opaque", "odd", "int_keys", "quantized"}
"""The fields that the first version takes; with any other it dies of a TypeError."""


def _saved(path: Path) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(2, 3))
    optim = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optim.step()
    save(model, optim, path)
    return model, optim


def _info(path: Path) -> tuple[str, ...]:
    packed: tuple[str, ...] = pickle.loads((path / ".metadata").read_bytes()).planner_data[INFO_KEY]
    return packed


def _record(path: Path, value: Any) -> None:
    """Put ``value`` in place of what our planner recorded."""
    file = path / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    metadata.planner_data[INFO_KEY] = value
    file.write_bytes(pickle.dumps(metadata))


def test_the_first_version_reads_what_is_saved_now(tmp_path: Path) -> None:
    _saved(tmp_path)
    packed = _info(tmp_path)
    assert packed[0] == "1"
    assert set(json.loads(packed[1])["optim"]) == _FIRST


def test_checkpoints_of_the_first_version(tmp_path: Path) -> None:
    model, optim = _saved(tmp_path)
    _record(tmp_path, _info(tmp_path)[:2])
    fresh = torch.optim.AdamW(model.parameters())
    assert_same(load(model, fresh, tmp_path)["state"], optim.state_dict()["state"])


def test_fields_of_a_later_version_are_passed_over(tmp_path: Path) -> None:
    model, optim = _saved(tmp_path)
    version, first, *_ = _info(tmp_path)
    _record(tmp_path, (version, first, json.dumps({"optim": {"of tomorrow": [1]}}), "{}"))
    fresh = torch.optim.AdamW(model.parameters())
    assert_same(load(model, fresh, tmp_path)["state"], optim.state_dict()["state"])


@pytest.mark.parametrize("version", ["2", "1.1", 2, None])
def test_an_unknown_version_is_an_error_that_names_it(tmp_path: Path, version: Any) -> None:
    model, optim = _saved(tmp_path)
    _record(tmp_path, (version, {"anything": 1}))
    calls: list[Any] = [
        lambda: load(model, optim, tmp_path),
        lambda: load(model, optim, tmp_path, strict=False),
        lambda: load(model, optim, tmp_path, form="full"),
        lambda: verify_optim_state(model, optim, tmp_path),
    ]
    for call in calls:
        with pytest.raises(dcp.api.CheckpointException, match="Load it with that version") as error:
            call()
        assert f"format {version!r}" in str(error.value)
        assert "CheckpointMismatchError" in str(error.value)


@pytest.mark.parametrize(
    "value",
    [
        *((), 5, {}, ("1",), ("1", "no json"), ("1", "[]"), ("1", None), ("1", "{}", 7)),
        *(("1", '{"optim": []}'), ("1", '{"optim": {"unknown": 1}}')),
    ],
    ids=str,
)
def test_damage_is_an_error_that_says_so(tmp_path: Path, value: Any) -> None:
    model, optim = _saved(tmp_path)
    _record(tmp_path, value)
    with pytest.raises(dcp.api.CheckpointException, match="is damaged, or was changed") as error:
        load(model, optim, tmp_path)
    assert "CorruptCheckpointError" in str(error.value)
