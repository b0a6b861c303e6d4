"""Flat optimizer state as entries of a checkpoint, without a planner and without IO.

``optim.state_dict()`` under FSDP1 is ``{"state": {id: {name: value}}, "param_groups": [...]}``
with 1-D pieces of flat tensors as values (the *flat* form).  A checkpoint has one entry per
FQN and state name, under paths like ``("optim", "state", "layers.0.weight", "exp_avg")``.  Here
the first is taken apart into the second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Number
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from dcp_fsdp_osd.checkpoint import per_rank_prefix
from dcp_fsdp_osd.containers import containers_of
from dcp_fsdp_osd.errors import LayoutError
from dcp_fsdp_osd.layout.flat import FlatLayout, ParamKind, ParamLayout, Piece, param_id
from dcp_fsdp_osd.layout.placements import dtensor_problem, lost_turns, placement_text
from dcp_fsdp_osd.lowbit.blocks import is_wrapper, local_part
from dcp_fsdp_osd.lowbit.save import quantized_entries
from dcp_fsdp_osd.save.report import GroupInfo, Report
from dcp_fsdp_osd.tree import Path, digest, dotted, holds_tensor, leaves

__all__ = ["SaveEntries", "option_digests", "save_entries"]


@dataclass
class SaveEntries:
    """One rank's optimizer or model as entries of a checkpoint.

    Attributes:
        plain: path -> value that DCP's default planner writes (scalars, whole tensors,
            DTensors, objects). Param groups are under this rank's group numbers.
        pieces: path -> (shape of the whole tensor, the local tensor, its boxes).
        whole: paths in ``plain`` of tensors that are whole though their parameter is cut.
        stateful: FQN -> the key in ``state`` under which its parameter has any.
        report: all of it that is no tensor.
    """

    plain: dict[Path, Any] = field(default_factory=dict)
    pieces: dict[Path, tuple[tuple[int, ...], torch.Tensor, list[Piece]]] = field(
        default_factory=dict
    )
    whole: list[Path] = field(default_factory=list)
    stateful: dict[str, Any] = field(default_factory=dict)
    report: Report = field(default_factory=Report)

    def is_per_rank(self, path: Path) -> bool:
        opaque = self.report.info.opaque
        return bool(opaque) and dotted(path) in opaque


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
    heads = {fqn: p.fqns[0] for p in layout.params if len(p.fqns) > 1 for fqn in p.fqns}
    entries = SaveEntries()
    entries.report = Report(heads=heads, signature=layout.signature, depth=len(key))
    _save_groups(state_dict["param_groups"], layout, key, entries)
    extras = {k: v for k, v in state_dict.items() if k not in ("state", "param_groups")}
    entries.report.containers.update(containers_of(extras, key))
    for name, value in extras.items():  # a subclass's own
        entries.plain.update(leaves(value, (*key, str(name))))
    _save_states(state_dict["state"], layout, key, entries)
    for param in layout.params:
        for segment in param.segments:
            entries.report.shard_groups[segment.fqn] = param.shard_group
            if segment.within is not None:
                entries.report.parts[segment.fqn] = segment.within
            if segment.order is not None:
                entries.report.orders[segment.fqn] = segment.order
            if segment.fqn not in entries.stateful and segment.numel:
                entries.report.stateless[segment.fqn] = [(segment.start, segment.stop)]
    return entries


def _save_states(
    states: Mapping[Any, Any], layout: FlatLayout, key: Path, entries: SaveEntries
) -> None:
    stateful = entries.stateful
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
            entries.report.info.user.append(str(name))
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
        named = isinstance(name, str)
        if param.empty and not (named and any(_is_whole(param, value) for _, value in found)):
            _save_empty(param, found, layout.signature, key, entries)
            found = []
        for path, value in found:
            _save_leaf(param, path, value, key, entries, named=named)
        if found or param.empty:
            for fqn in param.fqns:
                above = ("state", fqn)
                entries.report.containers.update(containers_of(state, (*key, *above), path=above))
        if found:
            stateful.update(dict.fromkeys(param.fqns, name))
    entries.report.containers.update(containers_of(user, (*key, "state"), path=("state",)))


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
        name = _per_rank_path(key, param, signature, path)
        entries.plain[name] = value
        entries.report.info.opaque[dotted(name)] = param.describe()
        shared = dotted(_state_path(key, param.fqns[0], path))
        own[dotted(name)] = shared
        if isinstance(value, torch.Tensor) and value.dim() and value.numel():
            entries.report.per_rank_of.append(shared)  # no piece of this parameter
    if own:
        entries.report.empties.append(own)


def _param_of(name: Any, layout: FlatLayout) -> ParamLayout | None:
    """The parameter that ``name`` has state of; an FQN within a flat parameter on its own."""
    number = param_id(name, layout)
    if number is None:
        return None
    param = layout.params[number]
    fqn = layout.resolve(name) if isinstance(name, str) else None
    if fqn is None or len(param.fqns) == 1:
        return param
    return ParamLayout((fqn,), (layout.shape_of(fqn),), ParamKind.NAMED, sharded=True)


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
        for name, value in group.items():
            if name != "params":
                entries.plain.update(leaves(value, (*prefix, str(name))))
        own = {name: value for name, value in group.items() if name != "params"}
        entries.report.containers.update(containers_of(own, prefix, path=("param_groups", i)))
        params: Path = (*prefix, "params")
        entries.plain[params] = fqns
        entries.report.groups.append(GroupInfo(tuple(fqns), {}))
    if len(named) != len(layout.params):
        raise LayoutError(
            f"{dotted(key)}: expected a state dict of {len(layout.params)} parameters, found "
            f"{len(named)}: it is not of the optimizer that the planner was made with"
        )


def option_digests(group: Mapping[Any, Any]) -> dict[str, str]:
    """Of a param group's options, by name."""
    return {
        str(name): digest(value)
        for name, value in group.items()
        if name not in ("params", "param_names")  # the latter as the wrapping has them
    }


def _save_leaf(
    param: ParamLayout, path: Path, value: Any, key: Path, entries: SaveEntries, *, named: bool
) -> None:
    """``named``: under an FQN, where a tensor may be whole though the parameter is cut here."""
    is_tensor = isinstance(value, torch.Tensor)
    distributed = isinstance(value, DTensor | ShardedTensor)
    if is_tensor and is_wrapper(local_part(value)):
        _save_quantized(param, path, value, key, entries)
        return
    if is_tensor:
        _save_placement(param, _state_path(key, param.fqns[0], path), value, entries)
    whole = named or param.kind is ParamKind.DTENSOR
    per_rank = param.sharded and not is_tensor and holds_tensor(value)
    if distributed or (is_tensor and not value.dim()) or not (is_tensor or per_rank):
        for fqn in param.fqns:  # a scalar of a flat parameter is one of each of its FQNs
            entries.plain[_state_path(key, fqn, path)] = value
    elif not per_rank and param.is_flat_shape(value.shape):
        local = value.detach()
        local = local if local.is_contiguous() else local.contiguous()
        for segment in param.segments:
            if segment.numel or not _numel(segment.shape):
                name = _state_path(key, segment.fqn, path)
                entries.pieces[name] = (segment.shape, local, list(segment.pieces()))
    elif not per_rank and (
        len(param.fqns) == 1 and (not param.sharded or (whole and _is_whole(param, value)))
    ):
        name = _state_path(key, param.fqns[0], path)
        entries.plain[name] = value
        if param.kind is ParamKind.FLAT:
            entries.whole.append(name)
        if tuple(value.shape) != param.shapes[0]:
            entries.report.info.odd.append(dotted(name))
    elif param.kind is ParamKind.NAMED:
        raise LayoutError(
            f"{dotted(_state_path(key, param.fqns[0], path))}: expected a whole tensor of shape "
            f"{param.shapes[0]}, a DTensor or a ShardedTensor under a parameter's name, found "
            f"{tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__}"
        )
    else:
        name = _per_rank_path(key, param, param.signature, path)
        entries.plain[name] = value
        entries.report.info.opaque[dotted(name)] = param.describe()
        entries.report.per_rank_of.append(dotted(_state_path(key, param.fqns[0], path)))


def _save_quantized(
    param: ParamLayout, path: Path, value: torch.Tensor, key: Path, entries: SaveEntries
) -> None:
    place = _state_path(key, param.fqns[0], path)
    split = quantized_entries(param, path, value, dotted(place))
    entries.report.quantized[dotted(place)] = split.how, split.interval
    if split.interval is None:
        place = _per_rank_path(key, param, param.signature, path)
        entries.report.info.opaque.update(
            (dotted((*place, name)), param.describe()) for name in split.plain
        )
    entries.plain.update(((*place, name), tensor) for name, tensor in split.plain.items())
    entries.pieces.update(((*place, name), piece) for name, piece in split.pieces.items())


def _is_whole(param: ParamLayout, value: Any) -> bool:
    return isinstance(value, torch.Tensor) and tuple(value.shape) == param.shapes[0]


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
        if like and (problem := lost_turns(text, param.placed)):
            raise LayoutError(f"{dotted(place)}: {problem}")
        if not like or text != param.placed:
            entries.report.info.placed[dotted(place)] = text
        if not like and value.dim():
            entries.report.info.odd.append(dotted(place))
    elif like and value.dim():
        entries.report.info.placed[dotted(place)] = ""


def _state_path(key: Path, fqn: str, path: Path) -> Path:
    return (*key, "state", fqn, *path)


def _per_rank_path(key: Path, param: ParamLayout, signature: str, path: Path) -> Path:
    return (*per_rank_prefix(key), param.fqns[0], signature, *path)


def _numel(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()
