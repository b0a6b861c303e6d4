"""FSDP1's private attributes: where this torch has one no more, the error names it."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel

from dcp_fsdp_osd import UnsupportedTorchError
from dcp_fsdp_osd.fsdp.optim import describe_target
from dcp_fsdp_osd.fsdp.units import fsdp_units
from dcp_fsdp_osd.fsdp.weights import drop_unsharded, flat_shards
from tests.models import Mlp, train_steps, wrap_fsdp1
from tests.ranks import run_ranks

FLAT = [
    "_param_infos",
    "_shard_param_infos",
    "_shapes",
    "_strides",
    "_param_extensions",
    "_params",
    "_sharded_size",
    "_shared_param_infos",
    "_shared_params",
]


def _without_each(rank: int, world: int, use_orig_params: bool) -> None:
    model = wrap_fsdp1(Mlp(), policy="root", use_orig_params=use_orig_params)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    (unit,) = fsdp_units(model.modules())
    describe_target(model, optim)  # before the first forward, as after it
    assert all(shard.local.numel() == shard.segment.numel for shard in flat_shards(model))
    drop_unsharded(model)
    train_steps(model, optim, 1)
    places = [(unit.flat, "FlatParameter", name) for name in FLAT]
    places += [(model, "FullyShardedDataParallel", name) for name in ("_handle", "_device_mesh")]
    places += [(unit.handle, "FlatParamHandle", "_training_state")]
    for owner, kind, name in places:
        value = getattr(owner, name)
        delattr(owner, name)
        with pytest.raises(UnsupportedTorchError, match=f"has no {kind}.{name}, from which"):
            describe_target(model, optim)
            list(flat_shards(model))
        if isinstance(owner, FullyShardedDataParallel):
            owner.__dict__[name] = value
        else:
            setattr(owner, name, value)
    describe_target(model, optim)
    assert list(flat_shards(model))


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_an_attribute_that_is_gone_is_named(use_orig_params: bool) -> None:
    run_ranks(_without_each, 2, use_orig_params)
