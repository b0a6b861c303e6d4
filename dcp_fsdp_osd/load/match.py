"""What a checkpoint has of each parameter, and what of that cannot be loaded here.  Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from dcp_fsdp_osd.checkpoint import CheckpointIndex, SavedInfo
from dcp_fsdp_osd.errors import LayoutError, Mismatch
from dcp_fsdp_osd.layout.flat import FlatLayout, ParamKind, ParamLayout
from dcp_fsdp_osd.layout.placements import Placed, lost_turns, placement_text
from dcp_fsdp_osd.load.protocol import StateCodec
from dcp_fsdp_osd.load.schedule import LoadSchedule
from dcp_fsdp_osd.tree import Path, dotted

__all__ = ["SavedParams", "placed_for"]

_BY_NUMBER = (
    "expected parameters under their names, found them under numbers: optim.state_dict() was "
    "saved with DCP's default planner, or after FSDP.rekey_optim_state_dict. Which number is which "
    "parameter is not in the checkpoint. Load it with DCP's default planner into "
    "optim.state_dict() of the same model and optimizer (through FSDP.rekey_optim_state_dict to "
    "OptimStateKeyType.PARAM_NAME if it was rekeyed), and save it again with FlatOptimSavePlanner. "
    "If it was sharded FSDP1 state, it holds no more than one rank's pieces, and the rest is lost"
)
_ONE_OBJECT = (
    "saved as one object (flatten_state_dict=False; or no tensor in it, by torch before 2.4), "
    "which cannot be read in parts; load it with DCP's default planner and save it again"
)
_IN_PLACE = (
    "if the optimizer itself makes state of that shape, load in place, into optim.state_dict() "
    "after a step"
)


class SavedParams:
    """Finds the saved state of parameters. What does not match goes to ``schedule``: as a
    mismatch, and as a parameter to keep or an FQN to skip.

    Args:
        key: of the optimizer, for messages.
        codec: of state that is saved in another form.
    """

    def __init__(
        self,
        layout: FlatLayout,
        index: CheckpointIndex,
        key: str,
        codec: StateCodec,
        schedule: LoadSchedule,
    ) -> None:
        self.layout = layout
        self.index = index
        self.key = key
        self.codec = codec
        self.schedule = schedule
        self.info = index.info if index.info is not None else SavedInfo()
        self._odd = set(self.info.odd)
        groups = index.known_groups()
        self.in_groups = None if groups is None else {name for group in groups for name in group}
        self._like_param: dict[Path, bool] = {}

    def nothing(self) -> bool:
        """Whether the checkpoint has nothing of the optimizer that could be read: a mismatch."""
        if self.index.by_number:
            what = _BY_NUMBER
        elif not self.index.empty:
            return False
        elif self.index.one_object:
            what = _ONE_OBJECT
        else:
            what = "nothing in the checkpoint under this key"
        self.schedule.mismatches.append(Mismatch(self.key, found=what))
        self.schedule.keep.update(range(len(self.layout.params)))
        return True

    def _source(self, fqn: str) -> str | None:
        """The name under which the checkpoint has state of ``fqn``, if any."""
        saved = [name for name in self.layout.names_of(fqn) if name in self.index.state]
        if len(saved) > 1:
            tied = (
                f"tied parameters are one here, but the checkpoint has state of each of "
                f"{', '.join(saved)}"
            )
            self.schedule.mismatches.append(Mismatch(fqn, found=tied))
        return saved[0] if saved else None

    def sources(self, param: ParamLayout) -> dict[str, str]:
        """FQN -> the name under which the checkpoint has its state."""
        return {fqn: name for fqn in param.fqns if (name := self._source(fqn)) is not None}

    def keys(self, sources: Mapping[str, str]) -> dict[str, Path]:
        """Key -> path of what the checkpoint has of a parameter."""
        return {key: p for name in sources.values() for p, key in self.index.state[name].items()}

    def check_present(self, number: int, param: ParamLayout, sources: Mapping[str, str]) -> None:
        """An FQN that is in no saved group is missing; one without state only has none."""
        saved = self.in_groups
        if saved is None:
            return  # known when the groups are read
        for fqn in param.fqns:
            if fqn not in sources and not saved.intersection(self.layout.names_of(fqn)):
                self.schedule.mismatches.append(Mismatch(fqn))
                self.schedule.skip.add(fqn)
                if not sources:
                    self.schedule.keep.add(number)

    def misshapen(
        self,
        param: ParamLayout,
        sources: Mapping[str, str],
        current: Mapping[Path, Any],
        *,
        whole: bool = False,
    ) -> set[str]:
        """FQNs of which some saved tensor has a shape that cannot be loaded.

        Args:
            current: the parameter's state that is loaded in place. Where it has the saved shape,
                that is what the optimizer makes, whatever the parameter's is.
            whole: whether the tensors are loaded whole, however ranks shard.
        """
        wrong: set[str] = set()
        for fqn, name in sources.items():
            shape, number = self.layout.shape_of(fqn), self.layout.ids[fqn]
            tensors = {
                path: storage
                for path, key in self.index.state[name].items()
                if (storage := self.index.tensors.get(key)) is not None and storage.size
                if not self.codec.owns(number, path)
            }
            sizes = {tuple(storage.size) for storage in tensors.values()}
            for path, storage in tensors.items():
                if tuple(storage.size) == shape:
                    continue
                made = _has_shape(current.get(path), storage.size)
                key = self.index.state[name][path]
                cut = param.sharded or len(param.fqns) > 1
                if param.kind is ParamKind.DTENSOR and (made or key in self.info.placed):
                    continue
                if made and not cut:
                    continue
                factored = (
                    key in self._odd
                    or _factored(sizes, shape)
                    or self._never_like_param(path, storage.size, shape)
                )
                if factored and (whole or not cut):
                    continue
                wrong.add(fqn)
                self.schedule.mismatches.append(
                    self._misshapen(param, fqn, path, tuple(storage.size), factored)
                )
        self.schedule.skip.update(wrong)
        return wrong

    def _misshapen(
        self, param: ParamLayout, fqn: str, path: Path, size: tuple[int, ...], factored: bool
    ) -> Mismatch:
        shape = self.layout.shape_of(fqn)
        if not factored:
            cut = param.sharded or len(param.fqns) > 1
            remedy = "" if cut or self.index.info is not None else _IN_PLACE
            here = f"the parameter has {shape}"
            return Mismatch(fqn, dotted(path), f"shape {size}", here, remedy=remedy)
        found = (
            f"shape {size} in the checkpoint is that of state of an unsharded parameter, {shape}, "
            f"which cannot be cut for the current layout (rank holds {param.describe()})"
        )
        remedy = _IN_PLACE if param.kind is ParamKind.DTENSOR else ""
        return Mismatch(fqn, dotted(path), found, remedy=remedy)

    def _never_like_param(self, path: Path, size: torch.Size, shape: tuple[int, ...]) -> bool:
        """Whether a state can be a factor of a parameter, as it is of all others that have it."""
        if not set(size) <= {1, *shape}:
            return False
        if path not in self._like_param:
            sizes = [
                (tuple(storage.size), self.layout.shape_of(fqn))
                for name, paths in self.index.state.items()
                if path in paths and (fqn := self.layout.resolve(name)) is not None
                if (storage := self.index.tensors.get(paths[path])) is not None
            ]
            self._like_param[path] = len(sizes) < 2 or any(saved == own for saved, own in sizes)
        return not self._like_param[path]

    def per_rank_keys(self, param: ParamLayout) -> dict[Path, str] | None:
        """State that this rank alone can load; None, and a mismatch, if it is only others'."""
        saved = self.index.per_rank.get(param.fqns[0], {})
        own = {**saved.get(param.signature, {}), **saved.get(self.layout.signature, {})}
        layouts = self.index.info.layouts if self.index.info is not None else None
        if layouts is not None and self.layout.signature not in layouts:
            number = self.layout.ids[param.fqns[0]]
            if not all(self.codec.owns(number, path) for path in own):
                own = {}  # it may depend on all that the rank held
        if saved and not own and self.had_none(param):
            return {}
        if saved and not own and not (param.empty or _holds_nothing(param)):
            held = sorted(
                {self.info.opaque.get(n, "?") for k in saved.values() for n in k.values()}
            )
            names = sorted({dotted(p) for keys in saved.values() for p in keys})
            found = (
                f"state {', '.join(names)} was saved per rank and cannot be resharded: saved for "
                f"{'; '.join(held)}, this rank holds {param.describe()}"
            )
            remedy = "load at the world size and wrapping of the save"
            self.schedule.mismatches.append(Mismatch(param.fqns[0], found=found, remedy=remedy))
            return None
        return own

    def had_none(self, param: ParamLayout) -> bool:
        """Whether a rank that held just what this one does had no state of ``param``, as others."""
        held = {segment.fqn for segment in param.segments if segment.numel}
        stateless, signature = self.info.stateless, self.layout.signature
        return bool(held) and all(signature in stateless.get(fqn, ()) for fqn in held)

    def was_absent(self, param: ParamLayout, sources: Mapping[str, str]) -> bool:
        """Whether, when it was saved, no rank had state for any element that we hold."""
        held = [segment for segment in param.segments if segment.numel]
        tensors = [
            (segment, key)
            for segment in held
            for key in self.index.state.get(sources.get(segment.fqn, ""), {}).values()
            if key in self.index.tensors and self.index.tensors[key].size
        ]
        if not tensors:
            return self.had_none(param)
        for segment, key in tensors:
            box = segment.within
            where = [] if box is None else [list(box.offsets), list(box.sizes)]
            spans = [span for span in self.info.absent.get(key, ()) if span[2:] == where]
            if not any(a <= segment.start and segment.stop <= b for a, b, *_ in spans):
                return False
        return {segment.fqn for segment, _ in tensors} == {segment.fqn for segment in held}


def _has_shape(value: Any, size: torch.Size) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == size


def _factored(sizes: set[tuple[int, ...]], shape: tuple[int, ...]) -> bool:
    """Whether a state's tensors can be factors of one of ``shape`` (Adafactor's rows and columns).

    Factors differ in shape; all of one wrong shape are those of a parameter of that shape. Where
    one has the parameter's own shape, the others are not those of another parameter.
    """
    if shape in sizes:
        return True
    return len(sizes) > 1 and all(set(size) <= {1, *shape} for size in sizes)


def _holds_nothing(param: ParamLayout) -> bool:
    """Whether this rank has no element of a parameter that is no flat piece."""
    if param.kind is ParamKind.FLAT:
        return False
    return 0 in (param.shapes[0] if param.box is None else param.box.sizes)


def placed_for(
    param: torch.Tensor, storage: TensorStorageMetadata, record: str | None, current: Any
) -> Placed | None:
    """How a tensor that is saved under a DTensor parameter is to lie; None if as a plain tensor.

    Args:
        record: what ``SavedInfo.placed`` has of it.
        current: what it is loaded into; None if it is made anew.

    Raises:
        LayoutError: the checkpoint does not say how, for this mesh.
    """
    if not isinstance(param, DTensor):
        return None
    if _has_shape(current, storage.size):
        if not isinstance(current, DTensor):
            return None
        if any(placement.is_partial() for placement in current.placements):
            raise LayoutError(
                f"expected the optimizer's tensor sharded or replicated, found {current.placements}"
            )
        lost = lost_turns(placement_text(current), placement_text(param))
        if lost and current.shape == param.shape:
            raise LayoutError(lost)
        return Placed.of(current)
    if not record:
        like = record is None and storage.size and storage.size == param.shape
        return Placed.of(param) if like else None
    placed = Placed.read(record, storage.size, param)
    if placed is None:
        raise LayoutError(
            f"was saved as a DTensor with mesh dimensions and placements {record}, which say "
            f"nothing of this mesh ({param.device_mesh}); load in place, into optim.state_dict() "
            f"after a step"
        )
    return placed
