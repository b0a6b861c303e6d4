"""FlatOptimLoadPlanner: DCP's default load planner, plus flat optimizer state read in place.

Order of calls, by ``dcp.load``: ``set_up_planner`` and ``create_local_plan`` on every rank,
``create_global_plan`` on the coordinator (where mismatches of all ranks become one error, before
any tensor is allocated or touched, and where it is agreed who reads what for whom),
``finish_plan`` on every rank (which allocates), then ``resolve_tensor``/``commit_tensor``/
``load_bytes`` from the storage reader, from any thread. The commit of the last item waits for what
other ranks read for this one, and puts the optimizer's state dict together.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import threading
import typing
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from dcp_fsdp_osd.compact import Lazy
from dcp_fsdp_osd.errors import (
    CheckpointMismatchError,
    ExchangeError,
    Mismatch,
    listed,
    portable_errors,
)
from dcp_fsdp_osd.exchange.decide import Broadcast, describe, plan_reads
from dcp_fsdp_osd.exchange.reads import in_order
from dcp_fsdp_osd.exchange.worker import Exchange, ExchangeStats
from dcp_fsdp_osd.fsdp.optim import Target, describe_targets
from dcp_fsdp_osd.load.agree import Agreed, RankReport, agree, check_checkpoint
from dcp_fsdp_osd.load.begin import begin_loads, known_optims
from dcp_fsdp_osd.load.protocol import Form, StateLoad
from dcp_fsdp_osd.load.schedule import load_object
from dcp_fsdp_osd.load.wire import AnswerLoadPlan, SentLoadPlan, read_reports
from dcp_fsdp_osd.misuse.arguments import (
    HasRole,
    check_bool,
    check_key,
    check_optim,
    check_options,
    check_positive,
)
from dcp_fsdp_osd.misuse.default_device import cpu_by_default
from dcp_fsdp_osd.misuse.flat_form import check_rest
from dcp_fsdp_osd.misuse.in_use import InUse, begins, goes_on
from dcp_fsdp_osd.misuse.unfilled import check_filled
from dcp_fsdp_osd.misuse.waiting import watched
from dcp_fsdp_osd.storage.identity import identify
from dcp_fsdp_osd.tree import put_in_place, with_optim_removed

__all__ = ["FlatOptimLoadPlanner"]


class FlatOptimLoadPlanner(HasRole, DefaultLoadPlanner):
    """Read a checkpoint's optimizer state into this rank's flat shard, with no gather.

    Args:
        model: the wrapped model, at any world size and wrapping. Needed for plain dicts of
            optimizers alone: a :class:`FlatOptimState` carries its layout.
        optim: its optimizer, or a mapping from key to optimizer for several. Not changed: its
            parameters, state, groups and RNG stay as they are.
        key: where the optimizer's state dict lies in the state dict that is loaded; nested
            places are written with dots. Not used with a mapping.
        model_key: not needed: a :class:`FlatModelState` is found wherever it lies, and loaded into
            the model's own memory.
        form: what an empty dict is filled with. ``"flat"``: what ``optim.load_state_dict``
            takes, with this rank's flat tensors. ``"sharded"`` and ``"full"``: what
            ``set_optimizer_state_dict`` takes, with FQNs for keys, and with DTensors or
            ShardedTensors (without a gather), or with whole tensors on the CPU for values.
        rank0_only: with ``form="full"``: fill the dict on rank 0 of the load's process group
            alone; other ranks read nothing and keep an empty dict.
        strict: whether what does not match is an error. It covers optimizers and
            :class:`FlatModelState`, FQN by FQN: what the checkpoint lacks, what it has and no rank
            has a use for, shapes, dtypes and kinds that differ, and state that was saved per rank
            and cannot be resharded. With False these are skipped, what is there stays as it is to
            the bit, and :attr:`skipped` lists them. (In a flat tensor that is made anew their
            elements are zeros.) It covers nothing else: damaged or missing bytes, a checkpoint of
            a later format, and options that merged param groups disagree in are errors either way,
            and of the rest of the state dict DCP's own ``allow_partial_load`` decides.
        broadcast: whether what several ranks want alike (replicas, scalars, objects, whole tensors;
            of the whole state dict) is read by one of them, each a part, and broadcast, over NCCL
            to CUDA tensors where the job uses it, else over gloo. ``"auto"``: where it pays
            (:func:`~dcp_fsdp_osd.exchange.decide.plan_reads` has the rule). Off if off on any rank.
        stall_seconds: for how long a rank may not answer the others, or read nothing of what they
            wait for, before all ranks raise. ``StreamingReader`` reports its errors, which then
            raise everywhere at once; with other storage readers an error shows by this limit.
            Applies with `broadcast` alone.
        default_planner_options: of ``DefaultLoadPlanner``; ``flatten_state_dict=False`` is refused.

    The dict under each key is one of

    - ``{}``: filled on success with new tensors of the saved dtypes, none of which shares
      memory with another;
    - ``optim.state_dict()``, or a :class:`FlatOptimState`: the tensors of parameters' state are
      loaded in place, state that is not there yet is allocated, everything else is replaced in
      the dict (so ``optim.load_state_dict`` is needed all the same).

    Everything else in the state dict goes DCP's default way. One planner serves one ``dcp.load``
    at a time. When ``dcp.load`` raises, a dict that was empty still is (where each rank reads for
    itself, it may be filled on ranks that had read all of theirs before another failed); one that
    was being loaded in place may hold old and new tensors and is not to be used. Where a rank died
    or hangs, DCP's own collective fails after ours and hides the ``ExchangeError``, which is
    logged. That a stock checkpoint lacks an FQN, or that scalars of one flat parameter differ, is
    known only after reading.

    Attributes:
        skipped: after a load with ``strict=False``: a line for each entry that was skipped.
        exchanged: what the last load sent and received, or None if each rank read for itself.

    Raises:
        LayoutError: from the constructor, if the optimizer's parameters are not the model's.
        TypeError: from the constructor, for arguments of another kind.
        CheckpointMismatchError: (within DCP's ``CheckpointException``, on every rank) the
            checkpoint is not of this model and optimizer; lists the first ten mismatches of all
            ranks, and counts the others.
        ExchangeError: (likewise) another rank failed, whose rank and error it names.

    Replaces ``FSDP.optim_state_dict_to_load`` and ``load_sharded_optimizer_state_dict``.
    """

    role = "dcp.load(planner=...)"

    def __init__(
        self,
        model: nn.Module | None = None,
        optim: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | None = None,
        *,
        key: str = "optim",
        model_key: str | Sequence[str] | None = "model",
        form: Form = "flat",
        rank0_only: bool = False,
        strict: bool = True,
        broadcast: Broadcast = "auto",
        stall_seconds: float = 300.0,
        **default_planner_options: Any,
    ) -> None:
        check_optim(model, optim, type(self).__name__, several=True)
        check_key(key, type(self).__name__)
        check_options(default_planner_options, DefaultLoadPlanner, type(self))
        check_bool("strict", strict)
        check_bool("rank0_only", rank0_only)
        check_positive(stall_seconds=stall_seconds)
        if broadcast not in (True, False, "auto"):
            raise ValueError(f"expected broadcast=True, False or 'auto', found {broadcast!r}")
        if form not in typing.get_args(Form):
            raise ValueError(f"expected form='flat', 'sharded' or 'full', found {form!r}")
        if rank0_only and form != "full":
            raise ValueError(f"expected form='full' with rank0_only=True, found form={form!r}")
        self._init(
            *describe_targets(model, optim, key),
            strict,
            default_planner_options,
            form=form,
            broadcast=broadcast,
            stall_seconds=stall_seconds,
        )
        self._rank0_only = rank0_only
        self._has_model = True

    @classmethod
    def from_targets(
        cls,
        optims: Mapping[str, torch.optim.Optimizer],
        targets: Mapping[str, Target],
        *,
        strict: bool = True,
        **default_planner_options: Any,
    ) -> FlatOptimLoadPlanner:
        """The planner of optimizers (by key) whose layouts are known without a model.

        For planning any rank of any world in one process.
        """
        planner = cls.__new__(cls)
        planner._init(dict(optims), dict(targets), strict, default_planner_options)
        return planner

    def _init(
        self,
        optims: dict[str, torch.optim.Optimizer],
        targets: dict[str, Target],
        strict: bool,
        options: dict[str, Any],
        *,
        form: Form = "flat",
        broadcast: Broadcast = "auto",
        stall_seconds: float = 300.0,
    ) -> None:
        if not options.get("flatten_state_dict", True):
            raise ValueError("expected flatten_state_dict=True: optimizer state has flattened keys")
        super().__init__(**options)
        self._optims, self._targets, self._strict = optims, targets, strict
        self._form, self._rank0_only = form, False
        self._broadcast, self._stall_seconds = broadcast, stall_seconds
        self._has_model = False
        self._in_use, self._lock = InUse(), threading.Lock()
        self._loads: dict[str, StateLoad] = {}
        self._owner: dict[str, StateLoad] = {}  # key of an entry -> the load that it is read for
        self._pending: set[ReadItem] = set()
        self._given: dict[str, Any] = {}
        self._items: list[ReadItem] = []
        self._proposed: list[ReadItem] = []
        self._exchange: Exchange | None = None
        self.skipped: list[str] = []
        self.exchanged: ExchangeStats | None = None

    def __repr__(self) -> str:
        layouts = {key: target.layout for key, target in self._targets.items()}
        return (
            f"{type(self).__name__}({layouts or None}, form={self._form!r}, "
            f"strict={self._strict}, broadcast={self._broadcast!r})"
        )

    # ------------------------------------------------------------ planning

    @portable_errors()
    @begins
    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Find the optimizers in ``state_dict`` and in the checkpoint.  Touches no tensor."""
        if isinstance(metadata, bool):  # as dcp.save calls it
            raise TypeError("expected FlatOptimSavePlanner in dcp.save, found FlatOptimLoadPlanner")
        if metadata is None:
            raise CheckpointMismatchError("expected the checkpoint's metadata, found none")
        if self._exchange is not None:  # of a load that was given up
            self._exchange.failed(ExchangeError("the load was given up"))
        self._loads, self._owner, self._pending, self.skipped = {}, {}, set(), []
        self._items, self._exchange, self.exchanged = [], None, None
        optims = {key: (target, self._optims[key]) for key, target in self._targets.items()}
        optims = known_optims(state_dict, optims, has_model=self._has_model)
        self._loads = begin_loads(
            state_dict,
            optims,
            metadata,
            strict=self._strict,
            form=self._form,
            idle=self._rank0_only and not is_coordinator,
        )
        taken = [load.path for load in self._loads.values()]
        rest = with_optim_removed(state_dict, taken)
        check_rest(rest, optims, metadata, with_optims=bool(self._targets))
        self._skip(check_filled(state_dict, taken, metadata, strict=self._strict))
        super().set_up_planner(rest, metadata, is_coordinator)
        self._given = state_dict

    @portable_errors()
    @goes_on
    def create_local_plan(self) -> LoadPlan:
        """The reads of this rank: DCP's default ones, and those of its own elements."""
        plan = self._default_plan()
        self.original_state_dict = self._given  # where DCP's default planner puts objects
        if self.metadata is None:
            raise CheckpointMismatchError("expected set_up_planner to be called first")
        items = list(plan.items)
        for load in self._loads.values():
            own = load.plan().items
            self._owner.update((item.dest_index.fqn, load) for item in own)
            items += own
        self._items = in_order(items)
        report = RankReport(
            {key: load.report() for key, load in self._loads.items()},
            self._strict,
            describe(self._items, self._place, self._broadcast, self._rank0_only),
            identify(self.metadata),
            items,
        )
        self._proposed = items
        return watched(SentLoadPlan(items, plan.storage_data, report), "load")

    def _place(self, item: ReadItem) -> tuple[torch.dtype | None, torch.device]:
        """The dtype and device of what ``item`` is read to; nothing is allocated."""
        if item.type == LoadItemType.BYTE_IO:
            return None, torch.device("cpu")
        load = self._owner.get(item.dest_index.fqn)
        if load is not None:
            return load.place(item)
        tensor: torch.Tensor = super().resolve_tensor(item)
        return tensor.dtype, tensor.device

    def _default_plan(self) -> LoadPlan:
        """DCP's plan of everything else.

        DCP takes the checkpoint for one of torch 2.3 when a key is missing *here*, as it is for a
        ShardedTensor of which this rank has no shard, and then looks for keys of that format.
        Where the checkpoint has all of our keys there is nothing to guess.
        """
        if self.metadata is None or self.state_dict.keys() - self.metadata.state_dict_metadata:
            return super().create_local_plan()
        strict = not self.allow_partial_load
        return create_default_local_load_plan(self.state_dict, self.metadata, strict)

    @portable_errors()
    @cpu_by_default()
    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Refuse the load, on the coordinator for all ranks, if anything does not match.

        Raises:
            CheckpointMismatchError: of every mismatch of every rank, the first ten are listed.
        """
        reports = read_reports(global_plan)
        check_checkpoint(reports, global_plan)
        skipped = agree(reports)
        if self.metadata is None:
            raise CheckpointMismatchError("expected set_up_planner to be called first")
        shared = None
        # Ranks that have metadata each of their own have nothing in common, whatever its name.
        if all(report.checkpoint.save is not None for report in reports):
            shared = plan_reads(global_plan, [report.reads for report in reports], self.metadata)
        agreed = [Agreed(skipped, shared[rank] if shared else None) for rank in range(len(reports))]
        return super().create_global_plan(
            [AnswerLoadPlan.of(plan, each) for plan, each in zip(global_plan, agreed, strict=True)]
        )

    @portable_errors()
    @goes_on
    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Allocate, and keep this rank's reads; from here on tensors may be written."""
        agreed = new_plan.planner_data
        if not isinstance(agreed, Agreed):
            agreed = Agreed([], None)
        items = self._proposed if isinstance(new_plan.items, Lazy) else new_plan.items
        plan = super().finish_plan(LoadPlan(list(items), new_plan.storage_data))
        if agreed.shared is None:
            self._pending.update(plan.items)
            self._allocate(agreed.skipped)
        else:
            exchange = agreed.shared.begin(self._items, self._resolve, self._stall_seconds)
            self._exchange, self.exchanged = exchange, exchange.stats
            exchange.start()
            with self._reported():
                self._allocate(agreed.skipped)
                own = agreed.shared.own_reads(self._items)
                plan = dataclasses.replace(plan, items=[*dict.fromkeys([*exchange.reads, *own])])
                self._pending.update(plan.items)
                exchange.ready(own)
        if not self._pending:
            with self._reported():
                self._finish()
        return plan

    def _allocate(self, skipped: list[Mismatch]) -> None:
        self._skip(skipped)
        for load in self._loads.values():
            load.allocate()

    def _skip(self, mismatches: Sequence[Mismatch | str]) -> None:
        self.skipped += map(str, mismatches)
        if mismatches:
            text = f"skipped (strict=False; planner.skipped has all):\n  {listed(mismatches)}"
            warnings.warn(text, stacklevel=3)

    # ------------------------------------------------------------ reading

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The memory that ``read_item`` is to be read into: a view of the state itself."""
        with self._reported():
            exchange = self._exchange
            scratch = exchange.resolve_read(read_item) if exchange is not None else None
            return self._resolve(read_item) if scratch is None else scratch

    def _resolve(self, read_item: ReadItem) -> torch.Tensor:
        load = self._owner.get(read_item.dest_index.fqn)
        if load is None:
            tensor: torch.Tensor = super().resolve_tensor(read_item)
            return tensor
        return load.destination(read_item)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """``tensor`` (of :meth:`resolve_tensor`) is loaded."""
        with self._reported():
            if read_item.dest_index.fqn not in self._owner:
                super().commit_tensor(read_item, tensor)
            if self._exchange is not None:
                self._exchange.committed(read_item, tensor)
            self._done(read_item)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take an entry that is no tensor."""
        with self._reported():
            if self._exchange is None or self._exchange.took_object(read_item, value):
                self._take_object(read_item, value)
            self._done(read_item)

    def on_read_error(self, error: BaseException) -> None:
        """The storage reader has failed: report it to the other ranks (``StreamingReader`` calls
        this)."""
        if self._exchange is not None:
            self._exchange.failed(error)

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        """Report an error to the other ranks, whatever the storage reader makes of it."""
        with portable_errors():
            try:
                yield
            except BaseException as error:
                self.on_read_error(error)
                raise

    def _take_object(self, item: ReadItem, value: io.BytesIO) -> None:
        load = self._owner.get(item.dest_index.fqn)
        if load is None:
            key = item.dest_index.fqn
            path = self.mappings.get(key, ())
            if not put_in_place(self.original_state_dict, path, load_object(value)):
                value.seek(0)
                super().load_bytes(item, value)
        else:
            load.take_object(item.dest_index.fqn, load_object(value))

    def _done(self, item: ReadItem) -> None:
        with self._lock:
            if item in self._pending:
                self._pending.discard(item)
                if not self._pending:
                    self._finish()

    @cpu_by_default()
    def _finish(self) -> None:
        """All reads are done: check all optimizers, then fill all of their dicts."""
        exchange = self._exchange
        if exchange is not None:
            for item, payload in exchange.receive():
                self._take_object(item, io.BytesIO(payload))
        for load in self._loads.values():
            load.finish()
        if exchange is not None:
            exchange.conclude()
            self._exchange = None
        for load in self._loads.values():
            load.hand_over()
            self._skip(load.late)
            load.release()
