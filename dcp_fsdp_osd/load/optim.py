"""One optimizer's load on one rank, into the flat form: reads, memory, the finished state dict."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.tensor import DTensor

from dcp_fsdp_osd.allocate import empty_for_reading
from dcp_fsdp_osd.checkpoint import SavedInfo, index_checkpoint
from dcp_fsdp_osd.containers import containers_of, key_clashes
from dcp_fsdp_osd.errors import CheckpointMismatchError, Mismatch, listed
from dcp_fsdp_osd.fsdp.optim import Target
from dcp_fsdp_osd.layout.flat import param_id
from dcp_fsdp_osd.layout.geometry import narrowed_view
from dcp_fsdp_osd.load.assemble import Assembly, saved_containers
from dcp_fsdp_osd.load.current import Current, unwrapped
from dcp_fsdp_osd.load.groups import SavedGroups, match_groups, read_groups
from dcp_fsdp_osd.load.plan import plan_load
from dcp_fsdp_osd.load.protocol import LoadReport
from dcp_fsdp_osd.load.schedule import Kind, Leaf, LoadSchedule
from dcp_fsdp_osd.lowbit.load import LowBitLoad
from dcp_fsdp_osd.optim_class import OptimClass
from dcp_fsdp_osd.stateful.guard import mark_loaded
from dcp_fsdp_osd.tree import Path, dotted

__all__ = ["OptimLoad"]


class OptimLoad:
    """Loads one optimizer's state dict; a :class:`~dcp_fsdp_osd.load.protocol.StateLoad`.

    Args:
        target: the current optimizer's layout and parameters.
        path: of the optimizer in state dict and checkpoint.
        value: the dict that is loaded.
        optim: the optimizer; read for options that were not saved, never changed.
        metadata: of the checkpoint.
        strict: whether what is found only after reading is an error.
    """

    def __init__(
        self,
        target: Target,
        path: tuple[str, ...],
        value: dict[str, Any],
        *,
        optim: torch.optim.Optimizer,
        metadata: Metadata,
        strict: bool,
    ) -> None:
        self.target = target
        self.layout = target.layout
        self.path = path
        self.key = ".".join(path)
        self.optim = optim
        self.strict = strict
        self.current = Current(value, optim, target.layout)
        names = [n for fqn in self.layout.ids for n in self.layout.names_of(fqn)]
        self.index = index_checkpoint(metadata, path, names)
        self.info = self.index.info if self.index.info is not None else SavedInfo()
        self.codec = LowBitLoad(target, self.index, metadata, path, optim)
        self.current.encode(self.codec)
        self.optim_class = OptimClass(optim, self.info.optimizers, self.index.options())
        self.schedule = LoadSchedule()
        self.objects: dict[str, Any] = {}
        self.scalars: dict[str, torch.Tensor] = {}
        self.late: list[Mismatch] = []
        self._value = value
        self._result: dict[str, Any] = {}

    # ------------------------------------------------------------ plan

    def plan(self) -> LoadSchedule:
        lost = self._take_per_rank()
        self.schedule = plan_load(
            self.target,
            self.index,
            self.current.encoded,
            key=self.key,
            user=self.current.own_names,
            codec=self.codec,
            optim_class=self.optim_class,
        )
        self.schedule.mismatches += lost
        if self.index.knows_containers:
            self._check_keys()
        return self.schedule

    def _take_per_rank(self) -> list[Mismatch]:
        """Find what this rank saved of no parameter as its own; and what of it cannot be loaded."""
        lost: list[Mismatch] = []
        for name, by_layout in self.index.per_rank.items():
            if name and (self.layout.resolve(name) is not None or name not in self.info.user):
                continue  # of a parameter
            own = by_layout.get(self.layout.signature)
            if own is None:
                paths = dict.fromkeys(path for keys in by_layout.values() for path in keys)
                for where in ((name, dotted(p)) if name else (dotted(p), "") for p in paths):
                    found = (
                        "saved per rank, as it differed between ranks; this rank held something "
                        "else of the model, or did not take part"
                    )
                    remedy = "load at the world size and wrapping of the save"
                    lost.append(Mismatch(*where, found, remedy=remedy))
            for path, key in (own or {}).items():
                if name:
                    self.index.state.setdefault(name, {})[path] = key
                elif path[0] == "param_groups":
                    self.index.groups.setdefault(path[1], {})[path[2:]] = key
                else:
                    self.index.extra[path] = key
        return lost

    def _check_keys(self) -> None:
        """An optimizer does not find what is loaded under another key than its own."""
        paths: dict[int | None, list[Path]] = {}
        for leaf in self.schedule.leaves:
            paths.setdefault(leaf.param, []).append(leaf.path)
        for name, state in self.current.states.items():
            number = param_id(name, self.layout)
            if number is None:
                continue
            mine = containers_of(state, (), strict=False)
            fqn = self.layout.params[number].fqns[0]
            saved = saved_containers(self.index, self.layout, number)
            clashes = key_clashes(saved, mine, paths.get(number, ()))
            self.schedule.mismatches += [
                Mismatch(fqn, dotted(path), found, here) for path, found, here in clashes
            ]

    def report(self) -> LoadReport:
        own = [n for fqn in self.layout.ids for n in self.layout.names_of(fqn)]
        names = (*own, *self.index.renamed, *self.current.own_names, *self.info.user)
        raw = {fqn: name for name, fqn in self.index.renamed.items()}
        # Where all are numbers there is no name, which is a mismatch of its own.
        saved = () if self.index.by_number else (raw.get(n, n) for n in self.index.state)
        unused = "optimizer has no such parameter"
        if self.index.info is None:
            unused += (
                "; if it is state of the user's own, give the optimizer that name first: "
                "optim.state[name] = {}"
            )
        return LoadReport(tuple(self.schedule.mismatches), names, tuple(saved), unused)

    # ------------------------------------------------------------ allocate, read

    def allocate(self) -> None:
        for leaf in self.schedule.leaves:
            made = leaf.kind in (Kind.OBJECT, Kind.SCALAR, Kind.SKIPPED) or leaf.tensor is not None
            if made:
                continue
            if leaf.like is not None:
                leaf.tensor = leaf.like.empty(leaf.dtype)
                continue
            leaf.tensor = self._empty(leaf)
            if leaf.kind is Kind.PIECE and leaf.filled < leaf.tensor.numel():
                _zero_gaps(leaf, leaf.tensor)

    def _empty(self, leaf: Leaf) -> torch.Tensor:
        """Like the parameter in memory order, which fused optimizers rely on."""
        device = self._device(leaf)
        if leaf.kind is Kind.WHOLE and leaf.param is not None:
            like = self.target.params[leaf.param]
            if tuple(like.shape) == leaf.shape and not like.is_contiguous():
                return torch.empty_like(like, dtype=leaf.dtype, device=device, requires_grad=False)
        return empty_for_reading(leaf.shape, leaf.dtype, device)

    def _device(self, leaf: Leaf) -> torch.device:
        if leaf.kind is Kind.SCALAR or leaf.param is None:
            return torch.device("cpu")
        return self.target.devices[leaf.param]

    def place(self, item: ReadItem) -> tuple[torch.dtype | None, torch.device]:
        leaf = self.schedule.destinations.get(item.dest_index)
        if leaf is None:  # an object
            return None, torch.device("cpu")
        if leaf.tensor is not None and leaf.kind is not Kind.SCALAR:
            return leaf.dtype, leaf.tensor.device
        return leaf.dtype, self._device(leaf)

    def destination(self, item: ReadItem) -> torch.Tensor:
        key = item.dest_index.fqn
        leaf = self.schedule.destinations[item.dest_index]
        if leaf.kind is Kind.SCALAR:
            return self.scalars.setdefault(key, torch.empty((), dtype=leaf.dtype, device="cpu"))
        tensor = leaf.tensor
        if tensor is None:
            raise CheckpointMismatchError(f"{key}: read before it was allocated")
        local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        piece = leaf.pieces[item.dest_index]
        view = piece.view(local) if piece is not None else local
        return narrowed_view(view, item.dest_offsets, item.lengths)

    def take_object(self, key: str, value: Any) -> None:
        self.objects[key] = value

    # ------------------------------------------------------------ finish

    def finish(self) -> None:
        groups = self.saved_groups()
        known = {name for members in groups.members.values() for name in members}
        lacking = self._take_missing(known)
        assembly = Assembly(
            self.target,
            self.index,
            self.current,
            self.schedule,
            self.codec,
            self.objects,
            self.scalars,
            in_groups=known,
            strict=self.strict,
        )
        now = self.current.groups
        self._result = assembly.make(match_groups(groups, self.layout, now, self.key))
        self._refuse(assembly.clashes, lacking)
        assembly.write_in_place()

    def _take_missing(self, known: set[str]) -> list[Mismatch]:
        """Skip what the checkpoint has nothing of, the groups being read; what the plan missed."""
        missing: list[str] = []
        for number, param in enumerate(self.layout.params):
            lacking = self._lacking(param.fqns, known)
            self.schedule.skip.update(lacking)
            if len(lacking) == len(param.fqns):
                self.schedule.keep.add(number)
            missing += lacking
        return [] if self.index.known_groups() is not None else list(map(Mismatch, missing))

    def _lacking(self, fqns: Iterable[str], known: set[str]) -> list[str]:
        """Those that are neither in ``known`` groups of the checkpoint nor have state."""
        return [
            fqn
            for fqn in fqns
            if not any(n in known or n in self.index.state for n in self.layout.names_of(fqn))
        ]

    def _refuse(self, clashes: list[Mismatch], missing: list[Mismatch]) -> None:
        """Raise for what was found after reading; what is ``missing`` may be so if not strict."""
        if clashes or (missing and self.strict):
            raise CheckpointMismatchError(
                f"{self.key}: the checkpoint is not of this model and optimizer; the state that "
                f"was loaded in place is not to be used:\n  " + listed(clashes + missing)
            )
        self.late = missing

    def saved_groups(self) -> SavedGroups:
        """The checkpoint's param groups, all reads being done."""
        tensors = {
            leaf.name: leaf.tensor for leaf in self.schedule.leaves if leaf.kind is Kind.OPTION
        }
        return read_groups(self.index, {**tensors, **self.objects}, self.fqn)

    def fqn(self, name: str) -> str:
        """``name`` without the names of wrappers, where that is known."""
        return unwrapped(name, self.layout) or name

    def hand_over(self) -> None:
        self._value.update(self._result)
        mark_loaded(self._value)

    def release(self) -> None:
        self.schedule.clear()
        self.objects.clear()
        self.scalars.clear()
        self.codec.release()
        self.current.release()
        self._value, self._result = {}, {}


def _zero_gaps(leaf: Leaf, tensor: torch.Tensor) -> None:
    """Padding, and parameters without state, are zeros, as FSDP makes them."""
    at = 0
    spans = sorted(
        (piece.offset, piece.offset + piece.box.numel)
        for piece in leaf.pieces.values()
        if piece is not None
    )
    for low, high in [*spans, (tensor.numel(), tensor.numel())]:
        tensor[at:low].zero_()
        at = max(at, high)
