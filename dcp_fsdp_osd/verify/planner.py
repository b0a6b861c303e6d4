"""Is what lies in a checkpoint what is current, bit for bit?  Without a second copy of either.

Each rank reads its own elements again, a few MiB at a time into scratch that it lets go at once,
and compares.  No tensor crosses between ranks; only what differs is reported to all.

Replaces ``_verify_osd_by_load`` of ``torch.testing._internal.distributed.common_state_dict``, which
gathers the state, loads it into a second optimizer and compares the two.
"""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader

from dcp_fsdp_osd.errors import FlatOptimError, listed
from dcp_fsdp_osd.exchange.regions import narrowed
from dcp_fsdp_osd.fsdp.optim import describe_target
from dcp_fsdp_osd.load.model import ModelLoad
from dcp_fsdp_osd.load.optim import OptimLoad
from dcp_fsdp_osd.load.schedule import load_object
from dcp_fsdp_osd.misuse.arguments import check_model, check_optim, describe_kind, is_path
from dcp_fsdp_osd.stateful.model import FlatModelState
from dcp_fsdp_osd.stateful.optim import FlatOptimState
from dcp_fsdp_osd.storage import StreamingReader
from dcp_fsdp_osd.storage.identity import check_one_checkpoint, identify
from dcp_fsdp_osd.verify.comparison import Comparison, Difference, ModelComparison, OptimComparison

__all__ = ["Verification", "verify_model_state", "verify_optim_state"]

_SCRATCH_BYTES = 4 << 20
"""Most bytes of one read, where the reader can read parts."""


@dataclasses.dataclass(frozen=True)
class Verification:
    """What a comparison with a checkpoint found; the same on every rank.

    Iterating gives each :class:`Difference`. It has no truth value, because ``if verify(...):``
    would read well either way round: ask for :attr:`ok`.

    Attributes:
        what: what was compared, in words.
        differences: in the order of their names.
    """

    what: str
    differences: tuple[Difference, ...]

    @property
    def ok(self) -> bool:
        """Whether all is the same, bit for bit."""
        return not self.differences

    def __iter__(self) -> Iterator[Difference]:
        return iter(self.differences)

    def __len__(self) -> int:
        return len(self.differences)

    def __bool__(self) -> bool:
        raise TypeError(
            f"expected .ok to be asked for, found a Verification used as a bool: {self}"
        )

    def __str__(self) -> str:
        if self.ok:
            return f"{self.what}: the same in the checkpoint and live"
        return f"{self.what}: {len(self)} differ:\n  {listed(map(str, self))}"


def verify_optim_state(
    model: nn.Module,
    optim: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer],
    checkpoint: str | os.PathLike[str] | StorageReader,
    *,
    key: str = "optim",
    process_group: dist.ProcessGroup | None = None,
    max_ranges: int = 16,
) -> Verification:
    """Where a checkpoint and an optimizer differ: in state, in what has state, in options.

    Collective over ``process_group`` (of all that loads the checkpoint; by default the default
    group). Values are compared bit for bit, NaNs too; a scalar may be on any device. Nothing is
    changed and nothing allocated but bounded scratch: reads of at most 4 MiB, some of them at a
    time. With a reader other than ``StreamingReader`` a read is as large as the saved part, and
    what it needs besides is its own matter. Values that are no tensors are read whole.

    Args:
        optim: an optimizer, or a mapping from key to optimizer for several, which are compared one
            after the other; groups are then ``"<key>.param_groups.<i>"``.
        checkpoint: a path or URL, or a reader.
        key: where the optimizer lies in the checkpoint. Not used with a mapping.
        max_ranges: most element ranges that are reported of one tensor.

    Returns:
        The same on every rank: ``.ok`` if all is the same; iterating gives what differs. Padding
        is not compared.

    Raises:
        CheckpointException: on every rank, if planning or reading failed on any.
        FlatOptimError: on every rank, if comparing what was read failed on any.
    """

    check_optim(model, optim, "verify_optim_state", several=optim is not None)
    one = isinstance(optim, torch.optim.Optimizer)
    optims = {key: optim} if isinstance(optim, torch.optim.Optimizer) else dict(optim)
    if not optims:
        raise ValueError("verify_optim_state: expected an optimizer, found an empty mapping")
    differences: list[Difference] = []
    for name, each in optims.items():

        def begin(
            metadata: Metadata, key: str = name, optim: torch.optim.Optimizer = each
        ) -> Comparison:
            target = describe_target(model, optim)
            target.layout.check()
            value = FlatOptimState(model, optim).state_dict()
            path = tuple(key.split("."))
            plan = OptimLoad(target, path, value, optim=optim, metadata=metadata, strict=True)
            prefix = "" if one else f"{key}."
            return OptimComparison(plan, metadata, max_ranges, prefix=prefix)

        differences += _verify(begin, checkpoint, process_group)
    what = ", ".join(f"{type(each).__name__} {name!r}" for name, each in optims.items())
    return Verification(what, tuple(differences))


def verify_model_state(
    model: nn.Module,
    checkpoint: str | os.PathLike[str] | StorageReader,
    *,
    key: str = "model",
    process_group: dist.ProcessGroup | None = None,
    max_ranges: int = 16,
) -> Verification:
    """Where a checkpoint and a model's current weights, buffers and extra states differ.

    As :func:`verify_optim_state`. Of tied parameters the first name that the checkpoint has is
    compared; buffers that FSDP1 keeps in a lower precision are compared as they are saved.
    """

    if is_path(model) and isinstance(checkpoint, nn.Module):
        raise TypeError("verify_model_state: expected (model, checkpoint): they are swapped")
    check_model(model, "verify_model_state")

    def begin(metadata: Metadata) -> Comparison:
        path = tuple(key.split("."))
        plan = ModelLoad(path, FlatModelState(model).state_dict(), metadata=metadata)
        return ModelComparison(plan, metadata, max_ranges)

    return Verification(
        f"{type(model).__name__} {key!r}", _verify(begin, checkpoint, process_group)
    )


def _verify(
    begin: Callable[[Metadata], Comparison],
    checkpoint: str | os.PathLike[str] | StorageReader,
    group: dist.ProcessGroup | None,
) -> tuple[Difference, ...]:
    if isinstance(checkpoint, StorageReader):
        reader = checkpoint
    elif not is_path(checkpoint):
        raise TypeError(
            f"expected checkpoint to be a path, a URL or a StorageReader (StreamingReader), found "
            f"{describe_kind(checkpoint)}"
        )
    else:
        reader = StreamingReader(checkpoint, concurrency=2, max_inflight_bytes=32 << 20)
    planner = _ComparingPlanner(begin, parts=isinstance(reader, StreamingReader))
    load({}, storage_reader=reader, planner=planner, process_group=group)
    failure: Exception | None = None
    report = _RankReport(dist.get_rank() if dist.is_initialized() else 0)
    try:
        planner.finish(report)
    except Exception as error:  # reported to all ranks, which are about to wait for this one
        failure, report.error = error, f"{type(error).__name__}: {error}"
    reports = [report]
    if dist.is_initialized():
        reports = [report] * dist.get_world_size(group)
        dist.all_gather_object(reports, report, group=group)
    failed = [f"rank {each.rank}: {each.error}" for each in reports if each.error]
    if failed:
        raise FlatOptimError("comparing failed:\n  " + listed(failed)) from failure
    return _merged(reports)


@dataclasses.dataclass
class _RankReport:
    """What one rank has found, and the names that it has a use for."""

    rank: int
    differences: list[Difference] = dataclasses.field(default_factory=list)
    names: tuple[str, ...] = ()
    saved: tuple[str, ...] = ()
    error: str = ""


def _merged(reports: list[_RankReport]) -> tuple[Difference, ...]:
    """One tuple from those of all ranks: what several found alike is one difference."""
    known = {name for each in reports for name in each.names}
    ranks: dict[Difference, list[int]] = {}
    for each in reports:
        extra = [
            Difference(name, "", (), "in the checkpoint, but not here")
            for name in each.saved
            if name not in known
        ]
        for difference in [*each.differences, *extra]:
            ranks.setdefault(difference, []).append(each.rank)
    return tuple(sorted(dataclasses.replace(d, ranks=tuple(found)) for d, found in ranks.items()))


class _ComparingPlanner(LoadPlanner):
    """Has each of this rank's elements read into scratch, and compares it when it is there.

    Storage readers may call it from any thread.
    """

    def __init__(self, begin: Callable[[Metadata], Comparison], *, parts: bool) -> None:
        self._begin = begin
        self._parts = parts
        self._comparison: Comparison | None = None

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        if metadata is None:
            raise ValueError("expected the checkpoint's metadata, found none")
        self._checkpoint = identify(metadata)
        self._comparison = self._begin(metadata)

    @property
    def comparison(self) -> Comparison:
        if self._comparison is None:
            raise RuntimeError("expected set_up_planner to be called first")
        return self._comparison

    def create_local_plan(self) -> LoadPlan:
        items = self.comparison.items()
        if self._parts:
            items = [p for i in items for p in _parts(i, self.comparison.dtype_of(i).itemsize)]
        return LoadPlan(items, planner_data=self._checkpoint)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        check_one_checkpoint([plan.planner_data for plan in global_plan])
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.comparison.load.take_object(read_item.dest_index.fqn, load_object(value))

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return torch.empty(tuple(read_item.lengths), dtype=self.comparison.dtype_of(read_item))

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.comparison.compare(read_item, tensor)

    def finish(self, report: _RankReport) -> None:
        """Compare what could not be before all reads were done, and put it all in ``report``."""
        self.comparison.finish()
        report.differences = self.comparison.result()
        of_load = self.comparison.load.report()
        report.names, report.saved = of_load.names, of_load.saved_names


def _parts(item: ReadItem, itemsize: int) -> Iterator[ReadItem]:
    """``item`` in reads of about ``_SCRATCH_BYTES``, each a box of it."""
    sizes = list(item.lengths)
    long = next((d for d, n in enumerate(sizes) if n > 1), None)
    if item.type == LoadItemType.BYTE_IO or long is None:
        yield item
        return
    row = torch.Size(sizes[long + 1 :]).numel() * itemsize
    if row * sizes[long] <= _SCRATCH_BYTES:
        yield item
        return
    step = max(1, _SCRATCH_BYTES // row)
    for at in range(0, sizes[long], step):
        offsets = [at if d == long else 0 for d in range(len(sizes))]
        part = [min(step, n - at) if d == long else n for d, n in enumerate(sizes)]
        yield from _parts(narrowed(item, offsets, part), itemsize)
