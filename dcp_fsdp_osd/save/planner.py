"""FlatOptimSavePlanner: DCP's default save planner, plus flat optimizer state as boxes.

Order of calls, by ``dcp.save``: ``set_up_planner`` and ``create_local_plan`` on every rank,
``create_global_plan`` on the coordinator, ``finish_plan`` on every rank, then ``resolve_data``
for each item from the storage writer.  No tensor crosses between ranks: local plans carry
names, boxes and digests.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.tensor import DTensor

from dcp_fsdp_osd.checkpoint import is_flattened
from dcp_fsdp_osd.compact import Lazy, no_collections
from dcp_fsdp_osd.errors import LayoutError
from dcp_fsdp_osd.fsdp.optim import check_unwrapped, describe_targets
from dcp_fsdp_osd.layout.flat import FlatLayout
from dcp_fsdp_osd.misuse.arguments import HasRole, check_key, check_optim, check_options
from dcp_fsdp_osd.misuse.default_device import cpu_by_default
from dcp_fsdp_osd.misuse.flat_form import check_rest
from dcp_fsdp_osd.misuse.in_use import InUse, begins, goes_on
from dcp_fsdp_osd.misuse.safetensors_writer import check_safetensors
from dcp_fsdp_osd.misuse.waiting import watched
from dcp_fsdp_osd.optim_class import describe_optim
from dcp_fsdp_osd.save.agree import tensor_data
from dcp_fsdp_osd.save.entries import SaveEntries, option_digests, save_entries
from dcp_fsdp_osd.save.global_plan import plan_globally
from dcp_fsdp_osd.save.model import model_entries
from dcp_fsdp_osd.save.repeat import AsBefore, Kept, Numbered, Plans, unknown
from dcp_fsdp_osd.save.replicas import compared_of
from dcp_fsdp_osd.save.report import GroupInfo, Share
from dcp_fsdp_osd.save.template import Apart, Template, Values
from dcp_fsdp_osd.save.wire import LocalData, Outline, SentPlan, entries_of
from dcp_fsdp_osd.stateful.guard import guarded, without_guard
from dcp_fsdp_osd.stateful.model import ModelGuard
from dcp_fsdp_osd.stateful.optim import OptimGuard
from dcp_fsdp_osd.tree import (
    Path,
    dotted,
    find_optim,
    fingerprint,
    leaves,
    lies_on_meta,
    with_optim_removed,
)

__all__ = ["FlatOptimSavePlanner"]


class FlatOptimSavePlanner(HasRole, DefaultSavePlanner):
    """Write FSDP1 optimizer state from each rank's flat shard, with no gather.

    Args:
        model: the wrapped model; read for its layout, not kept. Needed for plain dicts of
            optimizers alone: a :class:`FlatOptimState` carries its layout.
        optim: its optimizer, or a mapping from key to optimizer for several. Given with `model`.
        key: where the optimizer's state dict lies in the state dict that is saved; nested places
            are written with dots (``"app.optim"``). Not used with a mapping.
        model_key: where models' plain state dicts lie, or several of such keys: there, as in a
            :class:`FlatModelState` (which is found wherever it lies), values may differ between
            ranks, as batch statistics do, with a warning.
        default_planner_options: of ``DefaultSavePlanner``. ``flatten_state_dict=False`` and
            ``enable_plan_caching=True`` are refused.

    The state dict holds ``optim.state_dict()`` as it is under each key, and any
    :class:`FlatOptimState` and :class:`FlatModelState`. Everything else in it goes DCP's default
    way; an optimizer's flat state that the planner was not told of is refused. The planner holds
    layouts only and can be pickled to the process of ``async_save``; it may be used for
    any number of saves as long as model and optimizer keep their parameters.

    Raises:
        LayoutError: from the constructor, if the optimizer's parameters are not the model's.
        TypeError: from the constructor, for arguments of another kind.

    Replaces ``FSDP.optim_state_dict`` before ``dcp.save``.
    """

    role = "dcp.save(planner=...)"

    def __init__(
        self,
        model: nn.Module | None = None,
        optim: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | None = None,
        *,
        key: str = "optim",
        model_key: str | Sequence[str] | None = "model",
        **default_planner_options: Any,
    ) -> None:
        check_optim(model, optim, type(self).__name__, several=True)
        check_key(key, type(self).__name__)
        check_options(default_planner_options, DefaultSavePlanner, type(self))
        optims, targets = describe_targets(model, optim, key)
        layouts = {name: target.layout for name, target in targets.items()}
        self._init(layouts, default_planner_options)
        keys = (model_key,) if isinstance(model_key, str) else tuple(model_key or ())
        self._model_keys = tuple(f"{name}." for name in keys)
        self._optimizers = {name: describe_optim(each) for name, each in optims.items()}
        self._params: dict[str, list[weakref.ref[torch.Tensor]]] = {
            name: [weakref.ref(param) for param in target.params]
            for name, target in targets.items()
        }

    @classmethod
    def from_layouts(
        cls, layouts: Mapping[str, FlatLayout], **default_planner_options: Any
    ) -> FlatOptimSavePlanner:
        """The planner of optimizers (by key) of which only the layout is known.

        For planning any rank of any world in one process.
        """
        planner = cls.__new__(cls)
        planner._init(dict(layouts), default_planner_options)
        planner._params, planner._model_keys = {}, ()
        return planner

    def _init(
        self,
        layouts: dict[str, FlatLayout],
        options: dict[str, Any],
    ) -> None:
        for option, allowed in (("flatten_state_dict", True), ("enable_plan_caching", False)):
            if options.get(option, allowed) != allowed:
                raise ValueError(
                    f"expected {option}={allowed}, found {options[option]}: "
                    f"optimizer state is written under flattened keys, and plans depend on values "
                    f"that DCP's class-level plan cache does not compare"
                )
        super().__init__(**options)
        self._layouts = layouts
        self._optimizers = {}
        self._in_use = InUse()
        self._kept: Kept | None = None
        self._plans: Plans | None = None  # on the coordinator
        self._template: Template | None = None
        self._planned = True
        self._reset()

    def _reset(self) -> None:
        self._apart = Apart()
        self._values = Values()
        self._items: list[WriteItem] = []
        self._share = Share()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._layouts or ''})"

    def __getstate__(self) -> dict[str, Any]:
        """Layouts and options; what a save is about is set up anew where it is unpickled."""
        state = dict(self.__dict__)
        for name in (
            "state_dict",
            "plan",
            "global_plan",
            "metadata",
            "_apart",
            "_values",
            "_items",
            "_proposed",
            "_outline",
        ):
            state.pop(name, None)
        empty = {"_kept": None, "_plans": None, "_template": None}
        return {**state, **empty, "_share": Share(), "mappings": {}, "_params": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    # ------------------------------------------------------------ local plan

    @begins
    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the optimizers out of ``state_dict`` (which stays as it is) as entries.

        Tensors are referenced until the save is over; they must not change before then.
        """
        if isinstance(storage_meta, Metadata):
            raise TypeError("expected FlatOptimLoadPlanner in dcp.load, found FlatOptimSavePlanner")
        self._reset()
        if not self._planned:  # the save before failed on the way there
            self._kept = None
        self._planned = False
        for key, layout in self._layouts.items():
            layout.check()
            if key in self._params:
                check_unwrapped(layout, [param() for param in self._params[key]])
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        facts = is_coordinator, several, self.flatten_state_dict, self.flatten_sharded_tensors
        values = None if self._template is None else self._template.fill(state_dict, facts)
        if self._template is not None and values is not None:
            self._apart, self._values = self._template.apart, values
            self.state_dict, self.is_coordinator = values.plain, is_coordinator
            self.mappings = dict(self._apart.mappings)
        else:
            self._template = None
            self._take_apart(state_dict, is_coordinator, several=several)
            if type(self) is FlatOptimSavePlanner:  # of others it is not known what counts
                self._template = Template.of(state_dict, self._apart, self._values, facts)
        self._compare()

    def _take_apart(
        self, state_dict: dict[str, Any], is_coordinator: bool, *, several: bool
    ) -> None:
        without = sorted(dotted(path) for path, value in leaves(state_dict) if lies_on_meta(value))
        if without:
            raise LayoutError(
                f"expected tensors with values, found {len(without)} on the meta device, which has "
                f"none: {', '.join(without[:10])}. Materialize them (to_empty, and load or "
                f"initialize), or leave them out"
            )
        layouts = dict(self._layouts)
        optimizers: dict[str, dict[str, Any] | None] = {**self._optimizers}
        for path, _, guard in guarded(state_dict, OptimGuard):  # knows better than the planner
            key = dotted(path)
            layouts[key], optimizers[key] = guard.known(), guard.optimizer
        found = {key: find_optim(state_dict, key) for key in layouts}
        flat = {
            key: (path, without_guard(value))
            for key, (path, value) in found.items()
            if not is_flattened(value)
        }
        models = [(path, value) for path, value, _ in guarded(state_dict, ModelGuard)]
        taken = [path for path, _ in [*flat.values(), *models]]
        rest = with_optim_removed(state_dict, taken)
        check_rest(rest, layouts, with_optims=bool(self._layouts))
        super().set_up_planner(rest, None, is_coordinator)
        self._apart.mappings, self._values.plain = self.mappings, self.state_dict
        for path, value in models:
            self._add(path, model_entries(value, path))
        if several:
            below = tuple(f"{dotted(path)}." for path, _ in models) + self._model_keys
            for name, value in self.state_dict.items():
                if not (isinstance(value, DTensor | ShardedTensor) or lies_on_meta(value)):
                    at = self._apart.of_models if name.startswith(below) else self._apart.others
                    at.append(name)
        for key, (path, value) in flat.items():
            entries = save_entries(value, layouts[key], path)
            optimizer = optimizers.get(key)
            if optimizer is not None:
                entries.report.info.optimizers.append(optimizer)
            self._add(path, entries)
            name = dotted(path)
            self._apart.compared[name] = compared_of(entries, layouts[key], replicas=several)
            self._apart.optims[name] = path, entries.stateful
            self._values.groups[name] = value["param_groups"]

    def _compare(self) -> None:
        """Put digests of the values of which one rank's are saved into the reports."""
        for name, report in self._apart.reports.items():
            if report.model:
                continue
            compared = self._apart.compared[name]
            report.scalars = compared.shared(self._values.of)
            report.replicas = compared.replicated(self._values.of)
            report.groups = [
                GroupInfo(group.fqns, option_digests(options))
                for group, options in zip(report.groups, self._values.groups[name], strict=True)
            ]

    def _add(self, path: Path, entries: SaveEntries) -> None:
        """Take values over for DCP's default plan, and boxes, and have them reported."""
        report = self._apart.reports[dotted(path)] = entries.report
        at = len(path) if report.model else len(path) + 1  # where paths name FQNs
        for where, value in entries.plain.items():
            self._values.plain[self._claim(where)] = value
        for where, (shape, local, pieces) in entries.pieces.items():
            name = self._claim(where)
            self._values.flat[name] = local
            report.pieces[name] = str(where[at])
            for piece in pieces:
                index = MetadataIndex(name, piece.box.offsets)
                self._apart.boxes[index] = name, piece
                self._items.append(_shard_item(index, piece.view(local), shape))

    def _claim(self, path: Path) -> str:
        name = dotted(path)
        if name in self.mappings and self.mappings[name] != path:
            raise LayoutError(
                f"expected distinct keys, found two entries of the state dict named {name!r}"
            )
        self.mappings[name] = path
        return name

    @goes_on
    def create_local_plan(self) -> SavePlan:
        """This rank's items: DCP's default ones, and its boxes."""
        template, apart, of = self._template, self._apart, self._values.of
        known = None if template is None else template.outline
        if template is not None and known is not None:
            plan, items = SavePlan([]), list(template.items)
        else:
            plan = super().create_local_plan()
            items = [*plan.items, *self._items]
        others, of_models = (
            {name: fingerprint(of(name)) for name in names}
            for names in (apart.others, apart.of_models)
        )
        data = LocalData(dict(self.mappings), apart.reports, others, of_models, items)
        self.plan = SentPlan(items, plan.storage_data, data)
        self._proposed = items
        self._outline = Outline.of(self.plan) if known is None else known.with_digests(data)
        data.outline = self._outline
        if template is not None and known is None:
            template.learn(list(items), self._outline)
        again = None if self._kept is None else self._kept.again(self._outline)
        sent: SavePlan = dataclasses.replace(self.plan)
        if again is not None:
            sent = SavePlan([], plan.storage_data, again.sent())
        return watched(sent, "save")

    # ------------------------------------------------------------ global plan

    @cpu_by_default()
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Agree over all ranks; on the coordinator alone.

        Raises:
            LayoutError: scalars or group options differ between ranks that hold the same part of
                the model, other values between any ranks, or elements of a state tensor are held
                by no rank that takes part.
        """
        known, self._plans = self._plans, None
        with no_collections():
            answers, metadata, self._plans = plan_globally(
                all_plans,
                known,
                super().create_global_plan,
                to_lowest=self.dedup_save_to_lowest_rank,
            )
        self.metadata, self.global_plan = metadata, answers
        return answers, metadata

    # ------------------------------------------------------------ writing

    @goes_on
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Take this rank's share of the global plan."""
        answer = new_plan.planner_data
        as_before = AsBefore.read(answer)
        if as_before is not None:
            if self._kept is None or self._kept.plans != as_before.plans:
                raise unknown()
            self._share = self._kept.share
            items = list(self._kept.items)
            new_plan = dataclasses.replace(new_plan, items=items, planner_data=None)
        elif isinstance(answer, Numbered):
            self._share = answer.share
            if answer.entries is not None and isinstance(new_plan.items, Lazy):
                own = [items for _, items, _, _ in entries_of(self._proposed)]
                items = answer.entries.of(own)
            else:
                items = list(new_plan.items)
            new_plan = SavePlan(items, new_plan.storage_data, None)
            self._kept = Kept(answer.plans, answer.number, self._outline.key, items, answer.share)
        check_safetensors(new_plan)
        self._planned = True
        held = {*self.state_dict, *self._share.renamed, *self._share.values}
        for item in new_plan.items:
            index = item.index
            if not (index.fqn in held or index in self._apart.boxes or index in self._share.zeros):
                raise LayoutError(
                    f"{index.fqn}: expected to write what this rank holds, found that the global "
                    f"plan wants of it {tuple(index.offset or ())}, which it does not hold"
                )
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: WriteItem) -> Any:
        """A view of the optimizer's own memory for a box; else as DCP's default planner."""
        if write_item.index in self._share.zeros:
            data = tensor_data(write_item)
            return torch.zeros(data.chunk.sizes, dtype=data.properties.dtype, device="cpu")
        box = self._apart.boxes.get(write_item.index)
        if box is None:
            found: Any = super().resolve_data(write_item)
            flattened = write_item.type == WriteItemType.SHARD and (
                write_item.index.fqn in self._share.renamed
            )
            return found.reshape(-1) if flattened else found
        name, piece = box
        return piece.view(self._values.flat[name])

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """As DCP's default planner; what cannot be pickled is named."""
        if write_item.type != WriteItemType.BYTE_IO:
            return object
        try:
            return super().transform_object(write_item, object)
        except Exception as error:  # whatever its own methods raise
            raise LayoutError(
                f"{write_item.index.fqn}: expected a value that can be pickled, found "
                f"{type(object).__qualname__}: {error}"
            ) from error

    def lookup_object(self, index: MetadataIndex) -> Any:
        if index.fqn in self._share.values:
            return self._share.values[index.fqn]
        name = self._share.renamed.get(index.fqn, index.fqn)
        if name in self._values.flat and name != index.fqn:
            return self._values.flat[name]
        return super().lookup_object(dataclasses.replace(index, fqn=name))


def _shard_item(index: MetadataIndex, view: torch.Tensor, shape: tuple[int, ...]) -> WriteItem:
    return WriteItem(
        index=index,
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=torch.Size(index.offset or ()), sizes=view.size()),
            # As create_from_tensor, but for the strides (torch 2.15), which differ from box to box.
            properties=TensorProperties(
                dtype=view.dtype,
                layout=view.layout,
                requires_grad=view.requires_grad,
                pin_memory=view.is_pinned(),
            ),
            size=torch.Size(shape),
        ),
    )
