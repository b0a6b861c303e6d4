"""From a current (model, optimizer) to a :class:`~dcp_fsdp_osd.layout.flat.FlatLayout`.

What FSDP1 keeps of its units comes from :mod:`~dcp_fsdp_osd.fsdp.units`; all else here is built
from that. No collective runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FlatParameter
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement

from dcp_fsdp_osd.compat import root_mesh
from dcp_fsdp_osd.errors import LayoutError
from dcp_fsdp_osd.fsdp.names import fqns_of, join_name, module_names
from dcp_fsdp_osd.fsdp.units import UnitParam, UnitView, fsdp_units, is_fsdp_managed, private_of
from dcp_fsdp_osd.layout.flat import FlatLayout, ParamKind, ParamLayout, Segment
from dcp_fsdp_osd.layout.geometry import Box, dim_order
from dcp_fsdp_osd.layout.placements import dtensor_problem, local_box, placement_text, wrong_rows

__all__ = [
    "ShardGroup",
    "Target",
    "check_unwrapped",
    "describe_target",
    "describe_targets",
    "in_two_dimensions",
    "segment_of",
    "unmet_params",
]


@dataclass(frozen=True)
class ShardGroup:
    """The ranks over which one FSDP1 unit is sharded: a process group, and its mesh if it has one.

    Its *sharded* state is cut by rows, as ``torch.Tensor.chunk`` cuts
    (``torch/distributed/fsdp/_shard_utils.py``), whatever the flat pieces are; over a mesh as
    ``placements`` say.
    """

    group: dist.ProcessGroup
    mesh: DeviceMesh | None
    placements: tuple[Placement, ...] = ()

    def box(self, shape: Sequence[int]) -> Box:
        """This rank's rows of a tensor of ``shape``; none of them is a box without elements."""
        if self.mesh is not None:
            return local_box(self.mesh, self.placements, torch.Size(shape))
        rows = -(-shape[0] // self.group.size())
        start = min(rows * self.group.rank(), shape[0])
        stop = min(start + rows, shape[0])
        return Box((start, *(0 for _ in shape[1:])), (stop - start, *shape[1:]))

    def tensor(self, local: torch.Tensor, shape: Sequence[int]) -> Any:
        """The whole tensor of ``shape`` of which ``local`` is this rank's box.

        A DTensor where FSDP was given a mesh, else a ShardedTensor. Nothing is communicated.
        """
        size = torch.Size(shape)
        if self.mesh is not None:
            stride = torch.empty(size, device="meta").stride()
            return DTensor.from_local(
                local, self.mesh, self.placements, run_check=False, shape=size, stride=stride
            )
        rows = -(-shape[0] // self.group.size())
        starts = range(0, shape[0], rows) if rows else [0] * self.group.size()
        shards = [
            ShardMetadata(
                [at, *(0 for _ in shape[1:])],
                [min(rows, shape[0] - at), *shape[1:]],
                self._place(rank, local.device),
            )
            for rank, at in enumerate(starts)
        ]
        mine = self.group.rank()
        return private_of(
            ShardedTensor, "_init_from_local_shards_and_global_metadata", "ShardedTensor"
        )(
            [LocalShard(local, shards[mine])] if mine < len(shards) else [],
            sharded_tensor_metadata=ShardedTensorMetadata(
                shards_metadata=shards,
                size=size,
                tensor_properties=TensorProperties(dtype=local.dtype),
            ),
            process_group=self.group,
        )

    def _place(self, rank: int, device: torch.device) -> str:
        number = dist.get_global_rank(self.group, rank)
        if device.type == "cpu":
            return f"rank:{number}/cpu"
        return f"rank:{number}/{device.type}:{number % torch.accelerator.device_count()}"


@dataclass(frozen=True)
class Target:
    """A current optimizer's layout, and what is needed to allocate its state.

    Attributes:
        layout: holds no tensor.
        params: the optimizer's parameters, in its order; not owned.
        devices: where the state of each belongs (the CPU for offloaded parameters).
        shards: for each FQN that FSDP1 shards, over whom.
    """

    layout: FlatLayout
    params: tuple[torch.Tensor, ...]
    devices: tuple[torch.device, ...]
    shards: Mapping[str, ShardGroup] = field(default_factory=dict)


def describe_target(model: nn.Module, optim: torch.optim.Optimizer) -> Target:
    """Find, for each parameter of ``optim``, which elements of which FQN this rank holds.

    Args:
        model: the (wrapped) model, on whose names the FQNs are based: FSDP1 at any place in it,
            FSDP2, DDP or plain. Wrapper names (FSDP, DDP, ``torch.compile``, activation
            checkpointing) are left out of FQNs, in whatever order they are nested.
        optim: its parameters must all be in ``model``.

    Raises:
        LayoutError: a parameter is not in the model, or its memory is no tensor's that we can cut.
            What other ranks may not find of theirs is left to ``layout.check``.
        UnsupportedTorchError: this torch keeps FSDP's layout elsewhere.
    """
    names = module_names(model)
    known = _describe_params(model, names)
    params, groups = _optim_params(optim, known.of)
    described = [known.of[id(param)] for param in params]
    layouts = tuple(each.layout for each in described)
    own = {fqn for layout in layouts for fqn in layout.fqns}
    aliases = {alias: fqn for alias, fqn in known.aliases.items() if fqn in own and alias != fqn}
    flat_names = _flat_names(names, {id(param): number for number, param in enumerate(params)})
    shards = {fqn: over for each in described for fqn, over in each.shards.items()}
    return Target(
        FlatLayout(layouts, aliases, groups, flat_names),
        tuple(params),
        tuple(each.device for each in described),
        shards,
    )


def describe_targets(
    model: nn.Module | None,
    optim: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | None,
    key: str,
) -> tuple[dict[str, torch.optim.Optimizer], dict[str, Target]]:
    """The optimizers by key (one alone is at ``key``), and their targets: none without a model."""
    optims = {key: optim} if isinstance(optim, torch.optim.Optimizer) else dict(optim or {})
    if model is None:
        return optims, {}
    return optims, {name: describe_target(model, each) for name, each in optims.items()}


@dataclass(frozen=True)
class _Described:
    """A parameter's layout, where its state belongs, and the groups that shard its FQNs."""

    layout: ParamLayout
    device: torch.device
    shards: dict[str, ShardGroup] = field(default_factory=dict)


@dataclass
class _Known:
    """What is known of a model's parameters: by ``id``, and other names of those that are tied."""

    of: dict[int, _Described] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)


def _describe_params(model: nn.Module, names: dict[nn.Module, list[str]]) -> _Known:
    known = _Known()
    for unit in fsdp_units(names):
        _describe_unit(unit, names, known)
    unmet = unmet_params(model)
    for module, prefixes in names.items():
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(param) in unmet or not isinstance(param, FlatParameter):
                fqns = [join_name(p, name) for p in prefixes]
                _describe_plain(param, fqns, known, unmet.get(id(param), ""))
    return known


def _optim_params(
    optim: torch.optim.Optimizer, known: Mapping[int, object]
) -> tuple[list[torch.Tensor], tuple[tuple[int, ...], ...]]:
    """The optimizer's parameters, and the numbers of those in each group."""
    params: list[torch.Tensor] = []
    groups: list[tuple[int, ...]] = []
    for number, group in enumerate(optim.param_groups):
        first = len(params)
        for position, param in enumerate(group["params"]):
            if id(param) not in known:
                raise LayoutError(
                    f"expected every parameter of the optimizer in the model, found that "
                    f"parameter {position} of group {number} (shape {tuple(param.shape)}) is not. "
                    f"With use_orig_params=False the optimizer must be made after the model is "
                    f"wrapped, from model.parameters()"
                )
            params.append(param)
        groups.append(tuple(range(first, len(params))))
    return params, tuple(groups)


def _flat_names(names: dict[nn.Module, list[str]], number_of: Mapping[int, int]) -> dict[str, int]:
    """Names of flat parameters in the wrapped model -> the optimizer's numbers for them."""
    return {
        join_name(prefix, name): number_of[id(param)]
        for module, prefixes in names.items()
        for name, param in module.named_parameters(recurse=False)
        for prefix in prefixes
        if isinstance(param, FlatParameter) and id(param) in number_of
    }


def check_unwrapped(layout: FlatLayout, params: Sequence[torch.Tensor | None]) -> None:
    """Raise LayoutError if a parameter that was whole is so no more; those that are gone pass.

    To be called where all ranks learn of one's error.
    """
    for described, param in zip(layout.params, params, strict=True):
        if described.kind is ParamKind.WHOLE and param is not None:
            found, shape = tuple(param.shape), described.shapes[0]
            if found != shape:
                raise LayoutError(
                    f"{described.fqns[0]}: expected a parameter of shape {shape}, as it was when "
                    f"the planner was made, found {found}: make the planner after the model is "
                    f"wrapped"
                )


def _describe_plain(param: torch.Tensor, fqns: list[str], known: _Known, problem: str) -> None:
    """A parameter that FSDP1 does not manage (or has a ``problem``), or one more name of one."""
    if id(param) in known.of:
        layout = known.of[id(param)].layout
        if len(layout.fqns) == 1:  # the first name that was met stays; others are tied to it
            known.aliases.update((fqn, layout.fqns[0]) for fqn in fqns if fqn != layout.fqns[0])
        return
    shape = tuple(param.shape)
    layout = ParamLayout((fqns[0],), (shape,), ParamKind.WHOLE, problem=problem)
    if isinstance(param, DTensor):
        box = None
        if param.device_mesh.get_coordinate() is not None:
            box = local_box(param.device_mesh, param.placements, param.shape)
            box = box if box.sizes != shape else None
        sharded = not all(placement.is_replicate() for placement in param.placements)
        problem = dtensor_problem(fqns[0], param)
        layout = ParamLayout(
            (fqns[0],),
            (shape,),
            ParamKind.DTENSOR,
            sharded=sharded,
            box=box,
            problem=problem,
            placed=placement_text(param),
        )
    known.of[id(param)] = _Described(layout, param.device)
    known.aliases.update((fqn, fqns[0]) for fqn in fqns[1:])


def unmet_params(model: nn.Module, *, replaced: bool = True) -> dict[int, str]:
    """What is wrong with parameters, by ``id``, that FSDP1 manages and no unit in ``model`` knows.

    They are flat, or one rank's piece, whatever else they look like.

    Args:
        replaced: also those that were put in the place of one that FSDP flattened.
    """
    names = module_names(model)
    met: set[int] = set()
    managed: set[tuple[nn.Module, str]] = set()
    for unit in fsdp_units(names):
        met.update(id(param) for param in (unit.flat, *unit.tied_params))
        met.update(id(each.param) for each in unit.params if each.param is not None)
        managed.update(each.place for each in unit.params)
        managed.update(other for other, _ in unit.tied)
    found: dict[int, str] = {}
    for module, (prefix, *_) in names.items():
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(param) in met:
                continue
            fqn = join_name(prefix, name)
            if replaced and (module, name) in managed:
                found[id(param)] = (
                    f"{fqn}: expected the parameter that FSDP flattened, found that another was "
                    f"put in its place after FSDP wrapped the model; change it in place "
                    f"(param.copy_), or run a forward pass before the optimizer is made"
                )
            elif is_fsdp_managed(param):
                found[id(param)] = (
                    f"{fqn}: expected the whole model, found a parameter (here of shape "
                    f"{tuple(param.shape)}) that is managed by an FSDP unit outside of the module "
                    f"that was passed, as with model.module of an FSDP root or a submodule of a "
                    f"unit: pass the model that FSDP wrapped, not what is inside of it"
                )
    return found


def _describe_unit(unit: UnitView, names: dict[nn.Module, list[str]], known: _Known) -> None:
    """The parameters that one FSDP instance has flattened."""
    members = []
    for param in unit.params:
        fqn, *others = fqns_of(param.place, names)
        known.aliases.update((other, fqn) for other in others)
        members.append(_member(unit, param, fqn))
    for other, primary in unit.tied:
        fqn = fqns_of(primary, names)[0]
        known.aliases.update((alias, fqn) for alias in fqns_of(other, names))
    if not unit.orig_params:
        known.of[id(unit.flat)] = _described(unit, _flat_layout(unit, members), members)
        return
    for param, member in zip(unit.params, members, strict=True):
        known.of[id(param.param)] = _described(unit, _orig_layout(unit, member), [member])


@dataclass(frozen=True)
class _Member:
    """One parameter of a unit: what this rank holds of it, over whom it is sharded (None if it is
    not), and what is wrong with it, if anything is."""

    segment: Segment
    over: ShardGroup | None
    problem: str = ""


def _member(unit: UnitView, param: UnitParam, fqn: str) -> _Member:
    segment = segment_of(fqn, param)
    over = _shard_group(unit, param.extension) if unit.sharded else None
    if param.extension is None:
        return _Member(segment, over)
    problem = ""
    try:
        segment = in_two_dimensions(segment, param.extension)
    except LayoutError as error:  # of this rank alone, maybe
        problem = str(error)
    if unit.orig_params and not unit.sharded:
        raise LayoutError(
            f"{fqn}: expected FSDP over tensor parallelism to shard over several ranks, or "
            f"to have use_orig_params=False, found an unsharded FSDP unit with "
            f"use_orig_params=True, which torch itself cannot train"
        )
    return _Member(segment, over, problem)


def _flat_layout(unit: UnitView, members: Sequence[_Member]) -> ParamLayout:
    """Of a flat parameter that stands for all of a unit's."""
    segments = tuple(member.segment for member in members)
    return ParamLayout(
        fqns=tuple(segment.fqn for segment in segments),
        shapes=tuple(segment.shape for segment in segments),
        kind=ParamKind.FLAT,
        segments=segments,
        numel=unit.numel,
        sharded=unit.sharded or any(segment.within is not None for segment in segments),
        shard_group=unit.shard_group,
        replicated=unit.replicated,
        problem="\n".join(member.problem for member in members if member.problem),
    )


def _orig_layout(unit: UnitView, member: _Member) -> ParamLayout:
    """Of a parameter on its own, with ``use_orig_params``: its local tensor is its segment."""
    own = dataclasses.replace(member.segment, offset=0)
    if not unit.sharded:
        return ParamLayout((own.fqn,), (own.shape,), ParamKind.WHOLE)
    return ParamLayout(
        fqns=(own.fqn,),
        shapes=(own.shape,),
        kind=ParamKind.FLAT,
        segments=(own,),
        numel=own.numel,
        sharded=True,
        shard_group=unit.shard_group,
        replicated=unit.replicated,
        problem=member.problem,
    )


def _described(unit: UnitView, layout: ParamLayout, members: Sequence[_Member]) -> _Described:
    shards = {each.segment.fqn: each.over for each in members if each.over is not None}
    return _Described(layout, unit.local.device, shards)


def in_two_dimensions(segment: Segment, extension: Any) -> Segment:
    """A segment of the local shard of a DTensor as one of the whole tensor.

    ``extension`` is what ``torch.distributed.tensor.parallel.fsdp`` keeps for a DTensor: its spec.
    """
    fqn = segment.fqn
    if not isinstance(extension, DTensorSpec):
        raise LayoutError(
            f"{fqn}: expected FSDP to have flattened a tensor or a DTensor, found an extension "
            f"that keeps {type(extension).__name__}, of which the whole tensor is not known"
        )
    whole = tuple(extension.shape)
    problem = wrong_rows(fqn, extension.mesh.shape, extension.placements, whole)
    if problem:
        raise LayoutError(problem)
    part = local_box(extension.mesh, extension.placements, extension.shape)
    if part.sizes != segment.shape:
        raise LayoutError(
            f"{fqn}: expected the local shard of {extension} to be of shape {part.sizes}, found "
            f"that FSDP flattened one of {segment.shape}"
        )
    return dataclasses.replace(segment, shape=whole, within=None if part.sizes == whole else part)


def _shard_group(unit: UnitView, spec: Any) -> ShardGroup:
    """How stock cuts *sharded* values of a parameter, with ``spec`` if it is a DTensor.

    With a mesh that is a slice of another, the values are DTensors over the whole of that
    (``torch.distributed.tensor.parallel.fsdp._chunk_dtensor``).
    """
    if unit.mesh is None:
        return ShardGroup(unit.group, None)
    if not unit.extended:
        replicated = (Replicate() for _ in range(unit.mesh.ndim - 1))
        return ShardGroup(unit.group, unit.mesh, (*replicated, Shard(0)))
    root = root_mesh(unit.mesh)
    placements: list[Placement] = [Replicate() for _ in range(root.ndim)]
    if spec is None:
        placements[0] = Shard(0)
    else:
        placements[-2:] = [Shard(0), spec.placements[0]]
    return ShardGroup(unit.group, root, tuple(placements))


def segment_of(fqn: str, param: UnitParam) -> Segment:
    """What this rank holds of a parameter (of the local shard, for a DTensor)."""
    try:
        order = dim_order(param.shape, param.stride)
    except ValueError as error:
        raise LayoutError(f"{fqn}: {error}; call .contiguous() before wrapping") from error
    return Segment(fqn, param.shape, param.start, param.stop, param.offset, order)
