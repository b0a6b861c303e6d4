"""Which entries of a checkpoint one rank's optimizer wants, and where each belongs.  Pure.

:func:`plan_load` compares the checkpoint's metadata with the layout and with the state dict that
is loaded into.  It allocates nothing, touches no tensor and runs no collective; what does not
match is reported, not raised, so that all of it can be printed at once for all ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dcp_fsdp_osd.checkpoint import CheckpointIndex
from dcp_fsdp_osd.errors import LayoutError, Mismatch
from dcp_fsdp_osd.fsdp.optim import Target
from dcp_fsdp_osd.layout.flat import ParamKind, ParamLayout, Piece, param_id
from dcp_fsdp_osd.layout.geometry import Box
from dcp_fsdp_osd.load.match import SavedParams, placed_for
from dcp_fsdp_osd.load.protocol import StateCodec
from dcp_fsdp_osd.load.schedule import Kind, Leaf, LoadSchedule, chunk_of, object_item, whole_chunk
from dcp_fsdp_osd.optim_class import OptimClass
from dcp_fsdp_osd.tree import Path, dotted, leaves

__all__ = ["check_params", "plan_load"]


def plan_load(
    target: Target,
    index: CheckpointIndex,
    current: Mapping[str, Any],
    *,
    key: str,
    user: Collection[str],
    codec: StateCodec,
    optim_class: OptimClass,
) -> LoadSchedule:
    """Plan the reads of one optimizer on one rank.

    Args:
        target: the optimizer's layout, its parameters (for DTensors' placements).
        index: what the checkpoint has of it.
        current: the state dict that is loaded into, encoded by `codec`; ``{}`` if it is to be made
            anew.
        key: of the optimizer, for messages.
        user: names in ``state`` of the optimizer's own, that are no parameter's.
        optim_class: of the optimizer, beside that of the checkpoint.

    Raises:
        CorruptCheckpointError: a saved tensor lacks elements that this rank needs.
    """
    planner = _Planner(target, index, current, key=key, codec=codec, optim_class=optim_class)
    planner.plan(user)
    return planner.schedule


def check_params(
    target: Target,
    index: CheckpointIndex,
    *,
    key: str,
    codec: StateCodec,
    optim_class: OptimClass,
) -> LoadSchedule:
    """Only the mismatches of :func:`plan_load`, as far as they do not depend on how ranks shard."""
    planner = _Planner(target, index, {}, key=key, codec=codec, optim_class=optim_class)
    planner.check()
    return planner.schedule


class _Planner:
    def __init__(
        self,
        target: Target,
        index: CheckpointIndex,
        current: Mapping[str, Any],
        *,
        key: str,
        codec: StateCodec,
        optim_class: OptimClass,
    ) -> None:
        self.target = target
        self.layout = target.layout
        self.index = index
        self.key = key
        self.codec = codec
        self.optim_class = optim_class
        self.schedule = LoadSchedule()
        self.mismatches = self.schedule.mismatches
        self.saved = SavedParams(target.layout, index, key, codec, self.schedule)
        states = current.get("state", {})
        self.current_of = {param_id(name, self.layout): state for name, state in states.items()}

    def check(self) -> None:
        if self.saved.nothing():
            return
        for number, param in enumerate(self.layout.params):
            sources = self.saved.sources(param)
            keys = self.saved.keys(sources)
            self.saved.check_present(number, param, sources)
            encoded = self.codec.check(number, keys, whole=True)
            self.mismatches += encoded
            self.saved.misshapen(param, sources, {}, whole=True)
            if self._unusable(number, param, keys.values()) or encoded:
                self.schedule.keep.add(number)
        for fqn, by_layout in self.index.per_rank.items():
            name = fqn or dotted(next(p for paths in by_layout.values() for p in paths))
            found = "has state that was saved per rank, as no whole tensor"
            self.mismatches.append(Mismatch(name, found=found))
        self.optim_class.warn(self.key)

    def plan(self, user: Collection[str]) -> None:
        if self.saved.nothing():
            return
        for number, param in enumerate(self.layout.params):
            before = len(self.mismatches)
            reads = self._plan_param(number, param)
            if reads is not None:
                self.schedule.join(reads)
            else:
                self.schedule.keep.add(number)
            if number in self.schedule.keep:
                self._report_siblings(param, self.mismatches[before:])
        self._plan_user_state({*user, *self.saved.info.user})
        for path, name in self.index.extra.items():
            _add_value(self.schedule, self.index, None, name, path, name).extra = True
        for options in self.index.groups.values():
            for name in options.values():
                storage = self.index.tensors.get(name)
                if storage is None:
                    self.schedule.items.append(object_item(name))
                else:
                    leaf = Leaf(Kind.OPTION, None, name, (), {name: name})
                    self.schedule.add_tensor(leaf, storage, [(None, whole_chunk(storage))])
        self.schedule.items += map(object_item, self.index.whole_objects())
        self.optim_class.warn(self.key)

    def _plan_param(self, number: int, param: ParamLayout) -> LoadSchedule | None:
        """The reads of one parameter's state; None, and a mismatch, if it cannot be loaded."""
        sources = self.saved.sources(param)
        per_rank = self.saved.per_rank_keys(param)
        self.saved.check_present(number, param, sources)
        current = dict(leaves(self.current_of.get(number) or {}))
        wrong = self.saved.misshapen(param, sources, current)
        if per_rank is None or (wrong and len(wrong) == len(sources)):
            return None
        sources = {fqn: name for fqn, name in sources.items() if fqn not in wrong}
        if param.empty:
            sources = {}  # but for what this rank alone has there
        if not (sources or per_rank) or self.saved.was_absent(param, sources):
            return LoadSchedule()
        keys = self.saved.keys(sources)
        if self._unusable(number, param, [*keys.values(), *per_rank]):
            return None
        wrongs = self.codec.check(number, keys, whole=False)
        if not wrongs:
            plan = _ParamPlan(self, number, param, current)
            wrongs = plan.add_all(sources, per_rank)
        self.mismatches += wrongs
        if wrongs:
            return None
        self.mismatches += plan.take_current()
        blank = [f for f in param.fqns if f not in sources and f not in self.schedule.skip]
        if blank and sources:
            warnings.warn(
                f"{self.key}: the checkpoint has no state of {blank}, which share one flat "
                f"parameter with {list(sources)[:3]}; their state becomes zeros, as FSDP does",
                stacklevel=2,
            )
        return plan.reads

    def _unusable(self, number: int, param: ParamLayout, paths: Iterable[Path]) -> bool:
        """Whether the optimizer's class would not find in the saved state what a step needs."""
        names = frozenset(str(path[0]) for path in paths if path)
        current = frozenset(map(str, self.current_of.get(number) or ()))
        dims = self.target.params[number].dim()
        problem = self.optim_class.check(number, param.fqns, dims, names, current=current)
        if problem:
            self.mismatches.append(Mismatch(param.fqns[0], found=problem))
        return bool(problem)

    def _report_siblings(self, param: ParamLayout, causes: Sequence[Mismatch]) -> None:
        """Name all parameters of a flat parameter that is skipped as a whole."""
        cause = causes[0].name if causes else "what cannot be loaded"
        reported = {each.fqn for each in causes}
        for fqn in param.fqns:
            if fqn not in reported:
                self.mismatches.append(Mismatch(fqn, found=f"one flat parameter with {cause}"))

    def _plan_user_state(self, names: Collection[str]) -> None:
        """State under names that are no parameter's: known to us, or to the current optimizer."""
        for name, entries in self.index.state.items():
            if name in names and self.layout.resolve(name) is None:
                for path, key in entries.items():
                    _add_value(self.schedule, self.index, None, name, path, key)


@dataclass
class _ParamPlan:
    """The reads of one parameter's state, as far as it matches."""

    of: _Planner
    number: int
    param: ParamLayout
    current: Mapping[Path, Any]
    """What is loaded into, by path."""
    reads: LoadSchedule = field(default_factory=LoadSchedule)
    saved: set[Path] = field(default_factory=set)
    """Paths of what the checkpoint has."""

    def add_all(self, sources: Mapping[str, str], per_rank: Mapping[Path, str]) -> list[Mismatch]:
        """Read all that is saved; what cannot be loaded, if anything.

        Args:
            sources: FQN -> name under which the checkpoint has its state.
            per_rank: path -> key of what this rank alone has.
        """
        states = self.of.index.state
        paths = dict.fromkeys(path for name in sources.values() for path in states[name])
        self.saved = {*paths, *per_rank}
        for path in paths:
            keys = {fqn: states[n][path] for fqn, n in sources.items() if path in states[n]}
            mismatch = self._add(path, keys)
            if mismatch is not None:
                return [mismatch]
        for path, key in per_rank.items():
            _add_value(self.reads, self.of.index, self.number, self.param.fqns[0], path, key)
        return []

    def _add(self, path: Path, keys: dict[str, str]) -> Mismatch | None:
        """Read one state. ``keys``: FQN -> key."""
        if self.of.codec.owns(self.number, path):
            return self._add_encoded(path, keys)
        stored = [self.of.index.tensors.get(key) for key in keys.values()]
        tensors = [storage for storage in stored if storage is not None]
        kinds = {"object" if s is None else "tensor" if s.size else "scalar" for s in stored}
        dtypes = {storage.properties.dtype for storage in tensors}
        if len(kinds) > 1 or len(dtypes) > 1:
            return Mismatch(
                self.param.fqns[0],
                dotted(path),
                f"{sorted(kinds)} {sorted(map(str, dtypes))} in {', '.join(keys)}",
                expected="one kind and dtype for all parameters of a flat parameter",
            )
        add: Callable[[Path, dict[str, str]], Mismatch | None] = self._add_piece
        if not tensors:
            add = self._add_objects
        elif self.param.kind is ParamKind.DTENSOR:
            add = self._add_dtensor
        elif not tensors[0].size:
            add = self._add_scalars
        elif self.param.kind is ParamKind.WHOLE or (
            len(self.param.fqns) == 1 and tuple(tensors[0].size) != self.param.shapes[0]
        ):
            add = self._add_whole
        return add(path, keys)

    def _leaf(self, kind: Kind, path: Path, keys: dict[str, str]) -> Leaf:
        return Leaf(kind, self.number, self.param.fqns[0], path, keys)

    def _add_objects(self, path: Path, keys: dict[str, str]) -> None:
        self.reads.add_objects(self.number, self.param.fqns[0], path, keys)

    def _add_scalars(self, path: Path, keys: dict[str, str]) -> None:
        """One of each parameter of a flat parameter, which are to be equal."""
        first = self.of.index.tensors[next(iter(keys.values()))]
        leaf = self.reads.add_tensor(self._leaf(Kind.SCALAR, path, keys), first)
        for key in keys.values():
            self.reads.read(leaf, key, self.of.index.tensors[key], [(None, whole_chunk(first))])

    def _add_whole(self, path: Path, keys: dict[str, str]) -> None:
        (key,) = keys.values()
        storage = self.of.index.tensors[key]
        leaf = self._leaf(Kind.WHOLE, path, keys)
        self.reads.add_tensor(leaf, storage, [(None, whole_chunk(storage))])

    def _add_piece(self, path: Path, keys: dict[str, str]) -> None:
        """This rank's elements of each parameter of a flat parameter, into its flat tensor."""
        first = self.of.index.tensors[next(iter(keys.values()))]
        leaf = self._leaf(Kind.PIECE, path, keys)
        self.reads.add_tensor(leaf, first, shape=(self.param.numel,))
        for segment in self.param.segments:
            if segment.fqn in keys and segment.numel:
                key = keys[segment.fqn]
                pieces = list(segment.pieces())
                wanted = [(piece, chunk_of(piece.box.offsets, piece.box.sizes)) for piece in pieces]
                self.reads.read(leaf, key, self.of.index.tensors[key], wanted)

    def _add_dtensor(self, path: Path, keys: dict[str, str]) -> Mismatch | None:
        """A tensor under a DTensor parameter: it lies as it does now, or as it did."""
        (key,) = keys.values()
        storage = self.of.index.tensors[key]
        record, current = self.of.saved.info.placed.get(key), self.current.get(path)
        try:
            like = placed_for(self.of.target.params[self.number], storage, record, current)
        except LayoutError as error:
            return Mismatch(self.param.fqns[0], dotted(path), str(error))
        if like is None:
            kind = Kind.WHOLE if storage.size else Kind.SCALAR
            leaf, chunks = self._leaf(kind, path, keys), [whole_chunk(storage)]
        else:
            leaf, chunks = self._leaf(Kind.DTENSOR, path, keys), list(like.chunks())
            leaf.like = like
        self.reads.add_tensor(leaf, storage, [(None, chunk) for chunk in chunks])
        return None

    def _add_encoded(self, path: Path, keys: dict[str, str]) -> Mismatch | None:
        """One of the 1-D tensors that an encoded value is saved as."""
        (key,) = keys.values()
        start, stop = self.of.codec.interval(self.number, path)
        if start < stop:
            size = (stop - start,)
            wanted = Piece(Box((start,), size), 0), chunk_of((start,), size)
            leaf = self._leaf(Kind.PIECE, path, keys)
            self.reads.add_tensor(leaf, self.of.index.tensors[key], [wanted], shape=size)
        return None

    # ------------------------------------------------------------ in place

    def take_current(self) -> list[Mismatch]:
        """Take the tensors that are loaded in place as destinations, where they match."""
        read = {leaf.path: leaf for leaf in self.reads.leaves}
        mismatches: list[Mismatch] = []
        for path, value in self.current.items():
            leaf = read.get(path)
            if leaf is None:
                if path not in self.saved:
                    mismatches.append(Mismatch(self.param.fqns[0], dotted(path)))
            elif isinstance(value, torch.Tensor):
                mismatch = self._take(leaf, value)
                if mismatch is not None:
                    mismatches.append(mismatch)
                    leaf.kind = Kind.SKIPPED
        skipped = {
            index
            for leaf in self.reads.leaves
            if leaf.kind is Kind.SKIPPED
            for index in leaf.pieces
        }
        self.reads.items = [item for item in self.reads.items if item.dest_index not in skipped]
        return mismatches

    def _take(self, leaf: Leaf, value: torch.Tensor) -> Mismatch | None:
        """Have ``leaf`` read into ``value``; a mismatch if it cannot be."""
        if leaf.kind is Kind.SCALAR and not value.dim() and value.dtype == leaf.dtype:
            leaf.tensor = value.detach()
        if leaf.kind not in (Kind.PIECE, Kind.WHOLE, Kind.DTENSOR):
            return None
        name = self.param.fqns[0], dotted(leaf.path)
        if tuple(value.shape) != leaf.shape:
            expected = f"the optimizer's tensor to have shape {leaf.shape}"
            return Mismatch(*name, str(tuple(value.shape)), expected=expected)
        if value.dtype != leaf.dtype:
            return Mismatch(
                *name,
                str(leaf.dtype),
                f"{value.dtype} in the optimizer",
                remedy="load into an empty dict to take it as saved",
            )
        if leaf.like is not None and not leaf.like.alike(value):
            found = str(getattr(value, "placements", "a plain tensor"))
            expected = f"the optimizer's tensor to lie as {leaf.like.placements}"
            return Mismatch(*name, found, expected=expected)
        leaf.tensor, leaf.in_place = value.detach(), True
        return None


def _add_value(  # noqa: PLR0917
    reads: LoadSchedule,
    index: CheckpointIndex,
    number: int | None,
    name: str,
    path: Path,
    key: str,
) -> Leaf:
    """Read an object, or a tensor whole."""
    storage = index.tensors.get(key)
    if storage is None:
        return reads.add_objects(number, name, path, {name: key})
    kind = Kind.WHOLE if storage.size or number is None else Kind.SCALAR
    leaf = Leaf(kind, number, name, path, {name: key})
    return reads.add_tensor(leaf, storage, [(None, whole_chunk(storage))])
