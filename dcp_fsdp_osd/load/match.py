"""What a checkpoint has of each parameter, and what of that cannot be loaded here.  Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from dcp_fsdp_osd.checkpoint import CheckpointIndex
from dcp_fsdp_osd.errors import LayoutError
from dcp_fsdp_osd.layout.flat import FlatLayout, ParamKind, ParamLayout
from dcp_fsdp_osd.layout.placements import Placed
from dcp_fsdp_osd.load.schedule import LoadSchedule, factored_shapes
from dcp_fsdp_osd.lowbit.load import QuantizedLoad
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


_IN_PLACE = (
    ". If the optimizer itself makes state of that shape: load in place, into optim.state_dict() "
    "after a step"
)


class SavedParams:
    """Finds the saved state of parameters; problems go to ``result`` as lines.

    Args:
        key: of the optimizer, for messages.
        result: gets problems, and the numbers of parameters that cannot be loaded.
    """

    def __init__(
        self,
        layout: FlatLayout,
        index: CheckpointIndex,
        key: str,
        quantized: QuantizedLoad,
        result: LoadSchedule,
    ) -> None:
        self.layout = layout
        self.index = index
        self.key = key
        self.quantized = quantized
        self.result = result
        self.problems = result.problems
        groups = index.known_groups()
        self.odd = set(index.info.odd if index.info is not None else ())
        self.placed: Mapping[str, str] = index.info.placed if index.info is not None else {}
        self._like_param: dict[Path, bool] = {}
        self.in_groups = None if groups is None else {name for group in groups for name in group}

    def nothing(self) -> bool:
        """Whether the checkpoint has nothing of the optimizer that could be read; told as such."""
        if self.index.by_number:
            self.problems.append(f"{self.key}: {_BY_NUMBER}")
        elif not self.index.empty:
            return False
        else:
            self.problems.append(
                f"{self.key}: saved as one object (flatten_state_dict=False; or no tensor in it, "
                f"by torch before 2.4), which cannot be read in parts; load it with DCP's default "
                f"planner and save it again"
                if self.index.one_object
                else f"{self.key}: nothing in the checkpoint under this key"
            )
        self.result.keep.update(range(len(self.layout.params)))
        return True

    def _source(self, fqn: str) -> str | None:
        """The name under which the checkpoint has state of ``fqn``, if any."""
        found = [n for n in self.layout.names_of(fqn) if n in self.index.state]
        if len(found) > 1:
            self.problems.append(
                f"{fqn}: tied parameters are one here, but the checkpoint has state of each of "
                f"{', '.join(found)}"
            )
        return found[0] if found else None

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
                self.problems.append(f"{fqn}: not in the checkpoint")
                self.result.skip.add(fqn)
                if not sources:
                    self.result.keep.add(number)

    def misshapen(
        self,
        param: ParamLayout,
        sources: Mapping[str, str],
        live: Mapping[Path, Any],
        *,
        whole: bool = False,
    ) -> set[str]:
        """FQNs of which some saved tensor has a shape that cannot be loaded.

        Args:
            live: the parameter's state that is loaded in place. Where it has the saved shape, that
                is what the optimizer makes, whatever the parameter's is.
            whole: whether the tensors are loaded whole, however ranks shard.
        """
        wrong: dict[str, list[str]] = {}
        for fqn, name in sources.items():
            shape, number = self.layout.shape_of(fqn), self.layout.ids[fqn]
            keys = {
                path: key
                for path, key in self.index.state[name].items()
                if not self.quantized.owns(number, path)
            }
            stored = (self.index.tensors.get(key) for key in keys.values())
            sizes = {tuple(s.size) for s in stored if s is not None and s.size}
            for path, key in keys.items():
                storage = self.index.tensors.get(key)
                if storage is None or not storage.size or tuple(storage.size) == shape:
                    continue
                cut = param.sharded or len(param.fqns) > 1
                mine = live.get(path)
                made = isinstance(mine, torch.Tensor) and mine.shape == storage.size
                if param.kind is ParamKind.DTENSOR and (made or key in self.placed):
                    continue
                if made and not cut:
                    continue
                factored = (
                    key in self.odd
                    or factored_shapes(sizes, shape)
                    or self._never_like_param(path, storage.size, shape)
                )
                if factored and (whole or not cut):
                    continue
                what = f"{dotted((fqn, *path))}: shape {tuple(storage.size)} in the checkpoint"
                lines = wrong.setdefault(fqn, [])
                if factored:
                    lines.append(
                        f"{what} is that of state of an unsharded parameter, {shape}, which "
                        f"cannot be cut for the current layout (rank holds {param.describe()})"
                        + (_IN_PLACE if param.kind is ParamKind.DTENSOR else "")
                    )
                else:
                    way_out = "" if cut or self.index.info is not None else _IN_PLACE
                    lines.append(f"{what}, the parameter has {shape}{way_out}")
        self.problems += [line for lines in wrong.values() for line in lines]
        self.result.skip.update(wrong)
        return set(wrong)

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

    def opaque_keys(self, param: ParamLayout) -> dict[Path, str] | None:
        """State that this rank alone can load; None, and a problem, if it is only others'."""
        saved = self.index.opaque.get(param.fqns[0], {})
        own = {**saved.get(param.signature, {}), **saved.get(self.layout.signature, {})}
        layouts = self.index.info.layouts if self.index.info is not None else None
        if layouts is not None and self.layout.signature not in layouts:
            number = self.layout.ids[param.fqns[0]]
            if not all(self.quantized.owns(number, path) for path in own):
                own = {}  # it may depend on all that the rank held
        if saved and not own and self.had_none(param):
            return {}
        if saved and not own and not (param.empty or self.quantized.without_elements(param)):
            info = self.index.info.opaque if self.index.info is not None else {}
            held = sorted({info.get(n, "?") for keys in saved.values() for n in keys.values()})
            names = sorted({dotted(p) for keys in saved.values() for p in keys})
            self.problems.append(
                f"{param.fqns[0]}: state {', '.join(names)} was saved per rank and cannot be "
                f"resharded: saved for {'; '.join(held)}, this rank holds {param.describe()}. Load "
                f"at the world size and wrapping of the save"
            )
            return None
        return own

    def had_none(self, param: ParamLayout) -> bool:
        """Whether a rank that held just what this one does had no state of ``param``, as others."""
        info = self.index.info
        stateless = info.stateless if info is not None else {}
        held = [segment.fqn for segment in param.segments if segment.numel]
        signature = self.layout.signature
        return bool(held) and all(signature in stateless.get(fqn, ()) for fqn in held)

    def was_absent(self, param: ParamLayout, sources: Mapping[str, str]) -> bool:
        """Whether, when it was saved, no rank had state for any element that we hold."""
        info = self.index.info
        if info is None or not any(s.numel for s in param.segments):
            return False
        tensors = [
            (segment, key)
            for segment in param.segments
            if segment.numel
            for key in self.index.state.get(sources.get(segment.fqn, ""), {}).values()
            if key in self.index.tensors and self.index.tensors[key].size
        ]
        if not tensors:
            return self.had_none(param)
        for segment, key in tensors:
            part = segment.within
            where = [] if part is None else [list(part.offsets), list(part.sizes)]
            spans = [span for span in info.absent.get(key, ()) if span[2:] == where]
            if not any(a <= segment.start and segment.stop <= b for a, b, *_ in spans):
                return False
        return {segment.fqn for segment, _ in tensors} == {
            segment.fqn for segment in param.segments if segment.numel
        }


def placed_for(
    param: torch.Tensor, storage: TensorStorageMetadata, record: str | None, live: Any
) -> Placed | None:
    """How a tensor that is saved under a DTensor parameter is to lie; None if as a plain tensor.

    Args:
        record: what ``SavedInfo.placed`` has of it.
        live: what it is loaded into; None if it is made anew.

    Raises:
        LayoutError: the checkpoint does not say how, for this mesh.
    """
    if not isinstance(param, DTensor):
        return None
    if isinstance(live, torch.Tensor) and live.shape == storage.size:
        if not isinstance(live, DTensor):
            return None
        if any(placement.is_partial() for placement in live.placements):
            raise LayoutError(
                f"expected the optimizer's tensor sharded or replicated, found {live.placements}"
            )
        return Placed.of(live)
    if not record:
        like = record is None and storage.size and storage.size == param.shape
        return Placed.of(param) if like else None
    found = Placed.read(record, storage.size, param)
    if found is None:
        raise LayoutError(
            f"was saved as a DTensor with mesh dimensions and placements {record}, which say "
            f"nothing of this mesh ({param.device_mesh}); load in place, into optim.state_dict() "
            f"after a step"
        )
    return found
