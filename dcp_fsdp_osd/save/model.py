"""The dict of a :class:`~dcp_fsdp_osd.FlatModelState` as entries of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dcp_fsdp_osd.containers import containers_of
from dcp_fsdp_osd.errors import LayoutError
from dcp_fsdp_osd.save.entries import SaveEntries
from dcp_fsdp_osd.save.report import Report
from dcp_fsdp_osd.stateful.guard import GUARD_KEY, without_guard
from dcp_fsdp_osd.stateful.model import ModelGuard
from dcp_fsdp_osd.tree import leaves

__all__ = ["model_entries"]


def model_entries(state_dict: Mapping[str, Any], key: tuple[str, ...]) -> SaveEntries:
    """The dict of a :class:`FlatModelState` as entries of a checkpoint. Tensors are referenced,
    but for buffers that FSDP1 keeps in a lower precision than they are saved in."""
    guard: ModelGuard = state_dict[GUARD_KEY]
    guard.check()
    entries = SaveEntries()
    entries.report = Report(depth=len(key), model=True)
    for fqn, value in without_guard(state_dict).items():
        path = (*key, fqn)
        segment = guard.segments.get(fqn)
        if segment is None:
            if fqn in guard.dtypes:
                value = value.to(guard.dtypes[fqn])  # noqa: PLW2901
            entries.plain.update(leaves(value, path))
            entries.report.containers.update(containers_of(value, path, path=(fqn,)))
            continue
        if value.dim() != 1 or value.numel() != segment.numel or not value.is_contiguous():
            raise LayoutError(
                f"{fqn}: expected this rank's {segment.numel} elements, contiguous, found shape "
                f"{tuple(value.shape)}: the state dict of a FlatModelState was changed"
            )
        entries.report.shard_groups[fqn] = guard.shard_groups[fqn]
        if segment.within is not None:
            entries.report.parts[fqn] = segment.within
        if segment.order is not None:
            entries.report.orders[fqn] = segment.order
        if segment.numel or not torch.Size(segment.shape).numel():
            entries.pieces[path] = (segment.shape, value, list(segment.pieces()))
    return entries
