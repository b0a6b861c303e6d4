"""Flat optimizer state <-> entries of a checkpoint, without a planner and without IO.

``optim.state_dict()`` under FSDP1 is ``{"state": {id: {name: value}}, "param_groups": [...]}``
with 1-D pieces of flat tensors as values (the *flat* form).  A checkpoint has one entry per
FQN and state name, under paths like ``("optim", "state", "layers.0.weight", "exp_avg")``.  Here
the first is taken apart into the second, and :class:`FlatOptimState` wraps both directions in
DCP's ``Stateful`` protocol.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Number
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from .containers import Containers, containers_of
from .errors import CheckpointMismatchError, LayoutError
from .fsdp import Target, describe_target
from .geometry import Box
from .layout import FlatLayout, ParamLayout, Piece
from .optim_class import describe_optim
from .placements import dtensor_problem, placement_text
from .quantized import QuantizedReport, is_wrapper, local_part
from .quantized_save import add_quantized
from .roles import check_optim
from .tree import Path, dicts, digest, dotted, holds_tensor, leaves

__all__ = [
    "FlatOptimState",
    "GroupInfo",
    "OptimGuard",
    "SaveEntries",
    "is_flattened",
    "opaque_prefix",
    "save_entries",
]

G = TypeVar("G", bound="_Guard")
GUARD_KEY = "__needs_FlatOptimSavePlanner_or_FlatOptimLoadPlanner__"


# ---------------------------------------------------------------- what a save tells


@dataclass(frozen=True)
class GroupInfo:
    """One param group of one rank: its FQNs, and a digest of each option's value."""

    fqns: tuple[str, ...]
    options: Mapping[str, str]


# ---------------------------------------------------------------- taking a state dict apart


@dataclass
class SaveEntries:
    """One rank's optimizer state as entries of a checkpoint.

    Attributes:
        plain: path -> value that DCP's default planner writes (scalars, whole tensors,
            DTensors, objects). Param groups are under this rank's group numbers.
        pieces: path -> (shape of the whole tensor, the local tensor, its boxes).
        stateless: FQN -> intervals that this rank holds but has no state for.
        orders: FQN -> memory order, where it is not row-major.
        parts: FQN -> the box that tensor parallelism leaves this rank and its FSDP group of it.
        columns: FQN -> which FSDP group this rank is of (``ParamLayout.column``).
        groups: this rank's param groups, in its order.
        user: names in ``state`` that are no parameter's.
        opaque: path of per-rank state -> what part of the model it is of.
        opaque_of: keys that this state would have if it were no per-rank state.
        empties: for each parameter without elements here: key of each state of it (in ``opaque``)
            -> the key that others have it under.
        whole: paths in ``plain`` of tensors that are whole though their parameter is cut.
        odd, placed: as in ``SavedInfo``.
        containers: the mappings below the optimizer that are not dicts with text for keys.
        quantized: what of the above is quantized in blocks.
    """

    plain: dict[Path, Any] = field(default_factory=dict)
    pieces: dict[Path, tuple[tuple[int, ...], torch.Tensor, list[Piece]]] = field(
        default_factory=dict
    )
    stateless: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    orders: dict[str, tuple[int, ...]] = field(default_factory=dict)
    parts: dict[str, Box] = field(default_factory=dict)
    columns: dict[str, int] = field(default_factory=dict)
    groups: list[GroupInfo] = field(default_factory=list)
    user: list[str] = field(default_factory=list)
    opaque: dict[Path, str] = field(default_factory=dict)
    opaque_of: list[str] = field(default_factory=list)
    empties: list[dict[str, str]] = field(default_factory=list)
    whole: list[Path] = field(default_factory=list)
    odd: list[str] = field(default_factory=list)
    containers: Containers = field(default_factory=Containers)
    placed: dict[str, str] = field(default_factory=dict)
    quantized: QuantizedReport = field(default_factory=QuantizedReport)


def is_flattened(state_dict: Mapping[str, Any]) -> bool:
    """Whether this is a state dict with ``flatten_optimizer_state_dict=True``."""
    return "state" not in state_dict and any(
        str(k).startswith(("state.", "param_groups.")) for k in state_dict
    )


def opaque_prefix(key: Path) -> Path:
    """Where state that cannot be resharded lies: beside the optimizer, out of stock's sight."""
    return (*key[:-1], f"{key[-1]}__opaque")


def save_entries(state_dict: Mapping[str, Any], layout: FlatLayout, key: Path) -> SaveEntries:
    """Take an optimizer state dict apart.  Tensors are referenced; only a flat piece that is not
    contiguous is copied.

    Args:
        state_dict: of ``optim.state_dict()``, flat; or with FQNs for keys and DTensor,
            ShardedTensor or whole values.
        layout: of the same optimizer.
        key: path of the optimizer in the checkpoint.

    Raises:
        LayoutError: the state dict is not one of this layout.
    """
    if not isinstance(state_dict.get("state"), Mapping) or "param_groups" not in state_dict:
        raise LayoutError(
            f"{dotted(key)}: expected an optimizer state dict with 'state' and 'param_groups', "
            f"found keys {sorted(map(str, state_dict))[:6]}"
        )
    entries = SaveEntries()
    _save_groups(state_dict["param_groups"], layout, key, entries)
    extras = {k: v for k, v in state_dict.items() if k not in ("state", "param_groups")}
    entries.containers.update(containers_of(extras, key))
    for name, value in extras.items():  # a subclass's own
        entries.plain.update(leaves(value, (*key, str(name))))
    stateful = _save_states(state_dict["state"], layout, key, entries)
    for param in layout.params:
        for segment in param.segments:
            entries.columns[segment.fqn] = param.column
            if segment.part is not None:
                entries.parts[segment.fqn] = segment.part
            if segment.order is not None:
                entries.orders[segment.fqn] = segment.order
            if segment.fqn not in stateful and segment.numel:
                entries.stateless[segment.fqn] = [(segment.start, segment.stop)]
    return entries


def _save_states(
    states: Mapping[Any, Any], layout: FlatLayout, key: Path, entries: SaveEntries
) -> Mapping[str, Any]:
    """Take ``state`` apart; returns the FQNs that have any."""
    stateful: dict[str, Any] = {}
    user: dict[Any, Any] = {}
    for name, state in states.items():
        param = _param_of(name, layout)
        if param is None:
            if isinstance(name, Number):
                raise LayoutError(
                    f"{dotted(key)}: expected state of parameters, and other state under names, "
                    f"found some under {name!r}, of {len(layout.params)} parameters: a "
                    f"number is a parameter's, here or in another wrapping"
                )
            entries.user.append(str(name))
            entries.plain.update(leaves(state, (*key, "state", str(name))))
            user[name] = state
            continue
        for fqn in param.fqns:
            if fqn in stateful:
                raise LayoutError(
                    f"{dotted(key)}: expected one state per parameter, found that {name!r} and "
                    f"{stateful[fqn]!r} are both of {fqn!r}"
                )
        found = list(leaves(state))
        if param.empty:
            _save_empty(param, found, layout.signature, key, entries)
            found = []
        for path, value in found:
            _save_leaf(param, path, value, key, entries)
        if found or param.empty:
            for fqn in param.fqns:
                above = ("state", fqn)
                entries.containers.update(containers_of(state, (*key, *above), path=above))
        if found:
            stateful.update(dict.fromkeys(param.fqns, name))
    entries.containers.update(containers_of(user, (*key, "state"), path=("state",)))
    return stateful


def _save_empty(
    param: ParamLayout,
    found: Sequence[tuple[Path, Any]],
    signature: str,
    key: Path,
    entries: SaveEntries,
) -> None:
    """State of a parameter of which this rank has no element: nobody else's."""
    own: dict[str, str] = {}
    for path, value in found:
        name = _opaque_path(key, param, signature, path)
        entries.plain[name] = value
        entries.opaque[name] = param.describe()
        shared = dotted(_state_path(key, param.fqns[0], path))
        own[dotted(name)] = shared
        if isinstance(value, torch.Tensor) and value.dim() and value.numel():
            entries.opaque_of.append(shared)  # no piece of this parameter
    if own:
        entries.empties.append(own)


def _param_of(name: Any, layout: FlatLayout) -> ParamLayout | None:
    """The parameter that ``name`` has state of; an FQN within a flat parameter on its own."""
    number = param_id(name, layout)
    if number is None:
        return None
    param = layout.params[number]
    fqn = layout.resolve(name) if isinstance(name, str) else None
    if fqn is None or len(param.fqns) == 1:
        return param
    return ParamLayout((fqn,), (layout.shape_of(fqn),), "named", sharded=True)


def param_id(name: Any, layout: FlatLayout) -> int | None:
    """The parameter that a key of ``state`` or an element of ``params`` means, if any."""
    if isinstance(name, int) and not isinstance(name, bool):
        return name if 0 <= name < len(layout.params) else None
    return layout.id_of(name) if isinstance(name, str) else None


def _save_groups(groups: Any, layout: FlatLayout, key: Path, entries: SaveEntries) -> None:
    named: set[int] = set()
    for i, group in enumerate(groups):
        fqns: list[str] = []
        for name in group["params"]:
            number = param_id(name, layout)
            if number is None:
                raise LayoutError(
                    f"{dotted(key)}: expected parameters of the model that the planner was made "
                    f"with, found {name!r} in param group {i}. Make a new planner after "
                    f"add_param_group or wrapping"
                )
            if number not in named:
                fqns.extend(layout.params[number].fqns)
            named.add(number)
        prefix = (*key, "param_groups", i)
        options: dict[str, str] = {}
        for name, value in group.items():
            if name == "params":
                continue
            if name != "param_names":  # as the wrapping has them; no option
                options[str(name)] = digest(value)
            entries.plain.update(leaves(value, (*prefix, str(name))))
        own = {name: value for name, value in group.items() if name != "params"}
        entries.containers.update(containers_of(own, prefix, path=("param_groups", i)))
        params: Path = (*prefix, "params")
        entries.plain[params] = fqns
        entries.groups.append(GroupInfo(tuple(fqns), options))
    if len(named) != len(layout.params):
        raise LayoutError(
            f"{dotted(key)}: expected a state dict of {len(layout.params)} parameters, found "
            f"{len(named)}: it is not of the optimizer that the planner was made with"
        )


def _save_leaf(param: ParamLayout, path: Path, value: Any, key: Path, entries: SaveEntries) -> None:
    is_tensor = isinstance(value, torch.Tensor)
    distributed = isinstance(value, DTensor | ShardedTensor)
    if is_tensor and is_wrapper(local_part(value)):
        place = _state_path(key, param.fqns[0], path)
        opaque_place = _opaque_path(key, param, param.signature, path)
        add_quantized(entries, param, path, value, place=place, opaque_place=opaque_place)
        return
    if is_tensor:
        _save_placement(param, _state_path(key, param.fqns[0], path), value, entries)
    opaque = param.sharded and not is_tensor and holds_tensor(value)
    if distributed or (is_tensor and not value.dim()) or not (is_tensor or opaque):
        for fqn in param.fqns:  # a scalar of a flat parameter is one of each of its FQNs
            entries.plain[_state_path(key, fqn, path)] = value
    elif not opaque and param.is_flat_shape(value.shape):
        local = value.detach()
        local = local if local.is_contiguous() else local.contiguous()
        for segment in param.segments:
            if segment.numel or not _numel(segment.shape):
                name = _state_path(key, segment.fqn, path)
                entries.pieces[name] = (segment.shape, local, list(segment.pieces()))
    elif not opaque and (
        len(param.fqns) == 1 and (not param.sharded or tuple(value.shape) == param.shapes[0])
    ):
        name = _state_path(key, param.fqns[0], path)
        entries.plain[name] = value
        if param.kind == "flat":
            entries.whole.append(name)
        if tuple(value.shape) != param.shapes[0]:
            entries.odd.append(dotted(name))
    elif param.kind == "named":
        raise LayoutError(
            f"{dotted(_state_path(key, param.fqns[0], path))}: expected a whole tensor of shape "
            f"{param.shapes[0]}, a DTensor or a ShardedTensor under a parameter's name, found "
            f"{tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__}"
        )
    else:
        name = _opaque_path(key, param, param.signature, path)
        entries.plain[name] = value
        entries.opaque[name] = param.describe()
        entries.opaque_of.append(dotted(_state_path(key, param.fqns[0], path)))


def _check_dtensor(name: str, value: DTensor) -> None:
    """Raise for a DTensor of which DCP would save something else than it stands for."""
    problem = dtensor_problem(name, value)
    if any(placement.is_partial() for placement in value.placements):
        problem = (
            f"{name}: expected a DTensor that is sharded or replicated, found placements "
            f"{value.placements}: what a rank holds is a summand, no part of the tensor. "
            f"Redistribute it before saving"
        )
    if problem:
        raise LayoutError(problem)


def _save_placement(
    param: ParamLayout, place: Path, value: torch.Tensor, entries: SaveEntries
) -> None:
    """Record how a value lies, if not as a DTensor parameter does or as a load would take it."""
    if isinstance(value, DTensor):
        _check_dtensor(dotted(place), value)
    if param.kind != "dtensor":
        return
    like = tuple(value.shape) == param.shapes[0]
    if isinstance(value, DTensor):
        text = placement_text(value)
        if not like or text != param.placed:
            entries.placed[dotted(place)] = text
        if not like and value.dim():
            entries.odd.append(dotted(place))
    elif like and value.dim():
        entries.placed[dotted(place)] = ""


def _state_path(key: Path, fqn: str, path: Path) -> Path:
    return (*key, "state", fqn, *path)


def _opaque_path(key: Path, param: ParamLayout, signature: str, path: Path) -> Path:
    return (*opaque_prefix(key), param.fqns[0], signature, *path)


def _numel(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


# ---------------------------------------------------------------- Stateful


class _Guard:
    """Lies in a :class:`FlatOptimState`'s state dict, and stops a planner that is not ours.

    Stock planners ask each value for its write items or chunks; this one answers with an error.
    """

    loaded = False
    problem = ""
    owner, pieces = "FlatOptimState", "flat tensors"

    def check(self) -> None:
        """Raise LayoutError if there is a problem, where all ranks learn of it."""
        if self.problem:
            raise LayoutError(self.problem)

    def __create_write_items__(self, fqn: str, value: Any) -> NoReturn:
        self._refuse("dcp.save", "FlatOptimSavePlanner")

    def __create_chunk_list__(self) -> NoReturn:
        self._refuse("dcp.load", "FlatOptimLoadPlanner")

    def __get_tensor_shard__(self, index: Any) -> NoReturn:
        self._refuse("dcp.load", "FlatOptimLoadPlanner")

    def _refuse(self, call: str, planner: str) -> NoReturn:
        raise LayoutError(
            f"a {self.owner} holds one rank's pieces of {self.pieces}, which another planner "
            f"would take for whole tensors: pass planner={planner}() to {call}"
        )

    @classmethod
    def check_loaded(cls, state_dict: Mapping[str, Any]) -> None:
        """Raise CheckpointMismatchError unless our planner has loaded ``state_dict``."""
        guard = state_dict.get(GUARD_KEY)
        if not isinstance(guard, cls) or not guard.loaded:
            raise CheckpointMismatchError(
                f"expected a state dict that FlatOptimLoadPlanner has loaded, found one that it "
                f"has not seen: pass planner=FlatOptimLoadPlanner() to dcp.load with the "
                f"{cls.owner} itself"
            )


@dataclass(eq=False)
class OptimGuard(_Guard):
    """What the planners need to know of the optimizer whose state dict this lies in.

    Attributes:
        layout: of the optimizer, when its state dict was taken; None with a problem.
        optimizer: its class and defaults (``describe_optim``).
        target, optim: what a load is planned with; copies, and other processes, have the layout
            alone.
        problem: why it cannot be saved or loaded, of which other ranks may not know.
    """

    layout: FlatLayout | None = None
    optimizer: dict[str, Any] | None = None
    problem: str = ""
    loaded: bool = False
    target: Target | None = None
    optim: torch.optim.Optimizer | None = None

    @classmethod
    def of(cls, model: nn.Module, optim: torch.optim.Optimizer) -> OptimGuard:
        try:
            target = describe_target(model, optim)
        except LayoutError as error:
            return cls(problem=str(error))
        return cls(target.layout, describe_optim(optim), target=target, optim=optim)

    def known(self) -> FlatLayout:
        """The layout, where all ranks learn of an error of this one's."""
        self.check()
        if self.layout is None:
            raise LayoutError("expected the guard of a FlatOptimState to have its layout")
        self.layout.check()
        return self.layout

    def __reduce__(self) -> tuple[Any, ...]:
        return OptimGuard, (self.layout, self.optimizer, self.problem, self.loaded)

    def __deepcopy__(self, memo: Any) -> OptimGuard:
        return OptimGuard(self.layout, self.optimizer, self.problem, self.loaded)


class NotADict:
    """A ``Stateful`` that is no state dict itself; says so where it is used as one, or nested."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            if name in ("copy", "items", "keys", "values", "get", "pop", "setdefault", "update"):
                raise AttributeError(self._not_a_dict())
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __getitem__(self, key: Any) -> NoReturn:
        raise TypeError(self._not_a_dict())

    def __contains__(self, key: Any) -> NoReturn:
        raise TypeError(self._not_a_dict())

    def _not_a_dict(self) -> str:
        return (
            f"expected a state dict, found a {type(self).__name__}, which dcp.save and dcp.load "
            f"take as it is, and which dcp.load has loaded when it returns; its state dict is "
            f"that of its state_dict()"
        )

    def __create_write_items__(self, fqn: str, value: Any) -> NoReturn:
        raise LayoutError(
            f"expected a {type(self).__name__} at the top of the state dict, where DCP calls its "
            f"methods, found one at {fqn!r}: move it to the top, or put its state_dict() there"
        )


class FlatOptimState(NotADict, Stateful):
    """An FSDP optimizer as a DCP ``Stateful``: saved and loaded in place with no gather.

    ``dcp.save`` and ``dcp.load`` call :meth:`state_dict` and :meth:`load_state_dict`; both need
    our planners, which learn from it what this rank holds and need no argument for it; a stock
    planner raises rather than keep one rank's piece as the whole.

    Args:
        model: the wrapped model; read for its layout with each state dict.
        optim: its optimizer; not stepped, and changed by :meth:`load_state_dict` alone.

    Raises:
        TypeError: from the constructor, for arguments of another kind.

    Source: does for the flat form what ``torch.distributed.checkpoint.state_dict`` does with
    gathered tensors.
    """

    def __repr__(self) -> str:
        return f"FlatOptimState({type(self.model).__name__}, {type(self.optim).__name__})"

    def __init__(self, model: nn.Module, optim: torch.optim.Optimizer) -> None:
        check_optim(model, optim, type(self).__name__)
        self.model = model
        self.optim = optim

    def state_dict(self) -> dict[str, Any]:
        """``optim.state_dict()`` (its tensors, not copies), with its layout, and a guard against
        other planners."""
        return {GUARD_KEY: OptimGuard.of(self.model, self.optim), **self.optim.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what :class:`FlatOptimLoadPlanner` has loaded.

        ``optim.load_state_dict`` casts floating-point state to its parameter's dtype; here
        state keeps the dtype that it was saved with.

        Raises:
            CheckpointMismatchError: the state dict was not loaded by our planner.
        """
        OptimGuard.check_loaded(state_dict)
        loaded = {k: v for k, v in state_dict.items() if k != GUARD_KEY}
        self.optim.load_state_dict(loaded)
        params = [p for group in self.optim.param_groups for p in group["params"]]
        for number, state in loaded["state"].items():
            if isinstance(number, int) and number < len(params):
                self.optim.state[params[number]] = _as_saved(
                    state, self.optim.state[params[number]]
                )


def _as_saved(saved: Any, cast: Any) -> Any:
    """``cast`` (by ``Optimizer.load_state_dict``) with the dtypes and objects of ``saved``.

    What the optimizer itself made of a value (a tensor of a float ``step``) and where it
    put a tensor stays.
    """
    if isinstance(saved, Mapping) and isinstance(cast, Mapping):
        restored = {k: _as_saved(v, cast[k]) if k in cast else v for k, v in saved.items()}
        return {**cast, **restored}
    if isinstance(saved, torch.Tensor) and isinstance(cast, torch.Tensor):
        return cast if cast.dtype == saved.dtype else saved.to(cast.device)
    return cast if isinstance(cast, torch.Tensor) else saved


def guarded(
    state_dict: Mapping[str, Any], kind: type[G]
) -> Iterator[tuple[tuple[str, ...], dict[str, Any], G]]:
    """The state dicts of Statefuls that have a guard of ``kind``, with their paths."""
    for path, value in dicts(state_dict):
        guard = value.get(GUARD_KEY)
        if isinstance(guard, kind) and isinstance(value, dict):
            yield path, value, guard


def is_guarded(state_dict: Mapping[str, Any]) -> bool:
    return GUARD_KEY in state_dict


def without_guard(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in state_dict.items() if k != GUARD_KEY}


def mark_loaded(state_dict: Mapping[str, Any]) -> None:
    guard = state_dict.get(GUARD_KEY)
    if isinstance(guard, _Guard):
        guard.loaded = True


def load_object(stream: io.BytesIO) -> Any:
    """A non-tensor entry, as DCP's default planner loads it.

    Pickle: what may be in it is the storage reader's to decide (``StreamingReader`` checks byte
    entries before it hands them over).
    """
    return torch.load(stream, map_location="cpu", weights_only=False)
