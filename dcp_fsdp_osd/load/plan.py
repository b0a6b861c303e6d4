"""Which entries of a checkpoint one rank's optimizer wants, and where each belongs.  Pure.

:func:`plan_load` compares the checkpoint's metadata with the layout and with the state dict that
is loaded into.  It allocates nothing, touches no tensor and runs no collective; what does not
match is told as lines, not raised, so that all of it can be told at once for all ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from dcp_fsdp_osd.checkpoint import CheckpointIndex
from dcp_fsdp_osd.errors import CheckpointMismatchError, LayoutError
from dcp_fsdp_osd.fsdp.optim import Target
from dcp_fsdp_osd.layout.flat import ParamKind, ParamLayout, Piece, param_id
from dcp_fsdp_osd.layout.geometry import Box
from dcp_fsdp_osd.load.match import SavedParams, placed_for
from dcp_fsdp_osd.load.schedule import (
    EMPTY,
    Leaf,
    LoadSchedule,
    covering_reads,
    first_known,
    known,
    object_item,
    whole_chunk,
)
from dcp_fsdp_osd.lowbit.load import QuantizedLoad
from dcp_fsdp_osd.optim_class import OptimClass
from dcp_fsdp_osd.tree import Path, dotted, leaves

__all__ = ["check_params", "plan_load"]


def plan_load(
    target: Target,
    index: CheckpointIndex,
    live: Mapping[str, Any],
    *,
    key: str,
    user: Collection[str],
    quantized: QuantizedLoad,
    optim_class: OptimClass,
) -> LoadSchedule:
    """Plan the reads of one optimizer on one rank.

    Args:
        target: the optimizer's layout, its parameters (for DTensors' placements).
        index: what the checkpoint has of it.
        live: the state dict that is loaded into; ``{}`` if it is to be made anew.
        key: of the optimizer, for messages.
        user: names in ``state`` of the optimizer's own, that are no parameter's.
        quantized: by which ``live`` was split.
        optim_class: of the optimizer, beside that of the checkpoint.

    Raises:
        CorruptCheckpointError: a saved tensor lacks elements that this rank needs.
    """
    planner = _Planner(
        target, index, live, key=key, user=user, quantized=quantized, optim_class=optim_class
    )
    planner.plan()
    return planner.result


def check_params(
    target: Target,
    index: CheckpointIndex,
    *,
    key: str,
    quantized: QuantizedLoad,
    optim_class: OptimClass,
) -> LoadSchedule:
    """Only the problems of :func:`plan_load`, as far as they do not depend on how ranks shard."""
    planner = _Planner(target, index, {}, key=key, quantized=quantized, optim_class=optim_class)
    planner.check()
    return planner.result


class _Planner:
    def __init__(
        self,
        target: Target,
        index: CheckpointIndex,
        live: Mapping[str, Any],
        *,
        key: str,
        user: Collection[str] = (),
        quantized: QuantizedLoad,
        optim_class: OptimClass,
    ) -> None:
        self.target = target
        self.user = user
        self.optim_class = optim_class
        self.live_leaves: dict[Path, Any] = {}  # of the parameter that is being planned
        self.quantized = quantized
        self.layout = target.layout
        self.index = index
        self.live = live
        self.key = key
        self.result = LoadSchedule()
        self.problems = self.result.problems
        self.saved = SavedParams(target.layout, index, key, quantized, self.result)
        self.live_of = {param_id(k, self.layout): v for k, v in live.get("state", {}).items()}

    def check(self) -> None:
        if self.saved.nothing():
            return
        for number, param in enumerate(self.layout.params):
            sources = self.saved.sources(param)
            self.saved.check_present(number, param, sources)
            quantized = self.quantized.check_whole(number, self.saved.keys(sources))
            self.problems += quantized
            self.saved.misshapen(param, sources, {}, whole=True)
            if self._unusable(number, param, self.saved.keys(sources).values()) or quantized:
                self.result.keep.add(number)
        for fqn, found in self.index.opaque.items():
            name = fqn or dotted(next(p for paths in found.values() for p in paths))
            self.problems.append(f"{name}: has state that was saved per rank, as no whole tensor")
        self.optim_class.warn(self.key)

    def plan(self) -> None:
        if self.saved.nothing():
            return
        items = self.result.items
        for number, param in enumerate(self.layout.params):
            told = len(self.problems)
            items += self._plan_param(number, param)
            if number in self.result.keep:
                self._tell_siblings(param, self.problems[told:])
        items += self._plan_user_state()
        for path, name in self.index.extra.items():
            items += self._plan_value(None, name, path, name)
            self.result.leaves[-1].extra = True
        for options in self.index.groups.values():
            for name in options.values():
                storage = self.index.tensors.get(name)
                if storage is None:
                    items.append(object_item(name))
                else:
                    leaf = self._leaf("group", None, name, (), {name: name}, storage)
                    items += self._read(leaf, name, storage, [(None, whole_chunk(storage))])
        items += [object_item(name) for name in self.index.whole_objects()]
        self.optim_class.warn(self.key)

    def _plan_param(self, number: int, param: ParamLayout) -> list[ReadItem]:
        sources = self.saved.sources(param)
        opaque = self.saved.opaque_keys(param)
        self.saved.check_present(number, param, sources)
        self.live_leaves = dict(leaves(self.live_of.get(number) or {}))
        wrong = self.saved.misshapen(param, sources, self.live_leaves)
        if opaque is None or (wrong and len(wrong) == len(sources)):
            self.result.keep.add(number)
            return []
        sources = {fqn: name for fqn, name in sources.items() if fqn not in wrong}
        if param.empty:
            sources = {}  # but for what this rank alone has there
        if not (sources or opaque) or self.saved.was_absent(param, sources):
            return []
        if self._unusable(number, param, [*self.saved.keys(sources).values(), *opaque]):
            self.result.keep.add(number)
            return []
        items: list[ReadItem] = []
        first = len(self.result.leaves)
        problems = self.quantized.check(number, self.saved.keys(sources))
        if problems:
            self.problems += problems
            self.result.keep.add(number)
            return []
        paths = dict.fromkeys(p for name in sources.values() for p in self.index.state[name])
        for path in paths:
            keys = {
                fqn: self.index.state[name][path]
                for fqn, name in sources.items()
                if path in self.index.state[name]
            }
            if self.quantized.owns(number, path):
                items += self._plan_quantized(number, param, path, keys)
                continue
            found = self._plan_leaf(number, param, path, keys)
            if found is None:
                self.result.keep.add(number)
                del self.result.leaves[first:]
                return []
            items += found
        for path, name in opaque.items():
            items += self._plan_value(number, param.fqns[0], path, name)
        self._check_live(number, param, set(paths) | set(opaque), self.result.leaves[first:])
        blank = [f for f in param.fqns if f not in sources and f not in self.result.skip]
        if blank and sources:
            warnings.warn(
                f"{self.key}: the checkpoint has no state of {blank}, which share one flat "
                f"parameter with {list(sources)[:3]}; their state becomes zeros, as FSDP does",
                stacklevel=2,
            )
        return [item for item in items if not self._skipped(item)]

    def _unusable(self, number: int, param: ParamLayout, paths: Iterable[Path]) -> bool:
        """Whether the optimizer's class would not find in the saved state what a step needs."""
        names = frozenset(str(path[0]) for path in paths if path)
        live = frozenset(map(str, self.live_of.get(number) or ()))
        dims = self.target.params[number].dim()
        problem = self.optim_class.check(number, param.fqns, dims, names, live=live)
        if problem:
            self.problems.append(f"{param.fqns[0]}: {problem}")
        return bool(problem)

    def _tell_siblings(self, param: ParamLayout, lines: Sequence[str]) -> None:
        """Name all parameters of a flat parameter that is skipped as a whole."""
        for fqn in param.fqns:
            if not any(line.startswith((f"{fqn}:", f"{fqn}.")) for line in lines):
                self.problems.append(f"{fqn}: one flat parameter with {_named(lines)}")

    def _skipped(self, item: ReadItem) -> bool:
        found = self.result.destinations.get(item.dest_index)
        return found is not None and found[0].kind == "skipped"

    def _plan_leaf(
        self, number: int, param: ParamLayout, path: Path, keys: dict[str, str]
    ) -> list[ReadItem] | None:
        """Reads of one state of one parameter; None, and a problem, if it cannot be loaded."""
        stored = {fqn: self.index.tensors.get(key) for fqn, key in keys.items()}
        kinds = {
            "object" if s is None else "tensor" if s.size else "scalar" for s in stored.values()
        }
        dtypes = {s.dtype for s in (s.properties for s in stored.values() if s is not None)}
        label = dotted((*param.fqns[:1], *path))
        if len(kinds) > 1 or len(dtypes) > 1:
            self.problems.append(
                f"{label}: expected one kind and dtype for all parameters of a flat parameter, "
                f"found {sorted(kinds)} {sorted(map(str, dtypes))} in {', '.join(keys)}"
            )
            return None
        kind = kinds.pop()
        if param.kind is ParamKind.DTENSOR and kind != "object":
            return self._plan_dtensor(number, param, path, keys)
        if kind == "object":
            self.result.leaves.append(Leaf("object", number, param.fqns[0], path, keys))
            return [object_item(key) for key in keys.values()]
        if kind == "scalar" and param.shapes != ((),):
            leaf = self._leaf("scalar", number, param.fqns[0], path, keys, first_known(stored))
            return [
                item
                for fqn, key in keys.items()
                for item in self._read(leaf, key, known(stored[fqn]), [(None, EMPTY)])
            ]
        first = first_known(stored)
        odd = len(param.fqns) == 1 and tuple(first.size) != param.shapes[0]
        if param.kind is ParamKind.WHOLE or kind == "scalar" or odd:
            kind = "scalar" if kind == "scalar" else "whole"
            leaf = self._leaf(kind, number, param.fqns[0], path, keys, first)
            (key,) = keys.values()
            return self._read(leaf, key, first, [(None, whole_chunk(first))])
        leaf = self._leaf("local", number, param.fqns[0], path, keys, first)
        leaf.shape = (param.numel,)
        items: list[ReadItem] = []
        for segment in param.segments:
            if segment.fqn not in keys or not segment.numel:
                continue
            pieces = list(segment.pieces())
            chunks = [
                ChunkStorageMetadata(torch.Size(p.box.offsets), torch.Size(p.box.sizes))
                for p in pieces
            ]
            wanted = list(zip(pieces, chunks, strict=True))
            storage = known(stored[segment.fqn])
            items += self._read(leaf, keys[segment.fqn], storage, wanted)
        return items

    def _plan_dtensor(
        self, number: int, param: ParamLayout, path: Path, keys: dict[str, str]
    ) -> list[ReadItem] | None:
        """Reads of a tensor under a DTensor parameter: it lies as it does live, or as it did."""
        (key,) = keys.values()
        storage = known(self.index.tensors.get(key))
        own = self.target.params[number]
        label = dotted((param.fqns[0], *path))
        try:
            like = placed_for(own, storage, self.saved.placed.get(key), self.live_leaves.get(path))
        except LayoutError as error:
            self.problems.append(f"{label}: {error}")
            return None
        if like is None:
            kind = "whole" if storage.size else "scalar"
            leaf = self._leaf(kind, number, param.fqns[0], path, keys, storage)
            return self._read(leaf, key, storage, [(None, whole_chunk(storage))])
        leaf = self._leaf("dtensor", number, param.fqns[0], path, keys, storage)
        leaf.like = like
        return self._read(leaf, key, storage, [(None, chunk) for chunk in like.chunks()])

    def _plan_quantized(
        self, number: int, param: ParamLayout, path: Path, keys: dict[str, str]
    ) -> list[ReadItem]:
        """Reads of one of the 1-D tensors that a quantized value is saved as."""
        (key,) = keys.values()
        storage = known(self.index.tensors.get(key))
        start, stop = self.quantized.span(number, path, storage)
        if start == stop:
            return []
        leaf = self._leaf("local", number, param.fqns[0], path, keys, storage)
        leaf.shape = (stop - start,)
        chunk = ChunkStorageMetadata(torch.Size((start,)), torch.Size(leaf.shape))
        return self._read(leaf, key, storage, [(Piece(Box((start,), leaf.shape), 0), chunk)])

    def _leaf(  # noqa: PLR0917
        self,
        kind: str,
        number: int | None,
        name: str,
        path: Path,
        keys: dict[str, str],
        storage: TensorStorageMetadata,
    ) -> Leaf:
        leaf = Leaf(kind, number, name, path, keys, tuple(storage.size), storage.properties.dtype)
        self.result.leaves.append(leaf)
        return leaf

    def _read(
        self,
        leaf: Leaf,
        key: str,
        storage: TensorStorageMetadata,
        wanted: Sequence[tuple[Piece | None, ChunkStorageMetadata]],
    ) -> list[ReadItem]:
        """Reads of ``wanted`` boxes of a saved tensor; the saved boxes must cover them."""
        items = covering_reads(key, storage, [chunk for _, chunk in wanted])
        for piece, chunk in wanted:
            index = MetadataIndex(key, chunk.offsets)
            if index in self.result.destinations:
                raise CheckpointMismatchError(f"{key}: wanted for two values of the optimizer")
            leaf.pieces[index] = piece
            self.result.destinations[index] = (leaf, piece)
        leaf.filled += sum(item.lengths.numel() for item in items)
        return items

    def _plan_user_state(self) -> list[ReadItem]:
        """State under names that are no parameter's: known to us, or to the live optimizer."""
        names = {*self.user, *(self.index.info.user if self.index.info is not None else ())}
        items: list[ReadItem] = []
        for name, entries in self.index.state.items():
            if name in names and self.layout.resolve(name) is None:
                for path, key in entries.items():
                    items += self._plan_value(None, name, path, key)
        return items

    def _plan_value(self, number: int | None, name: str, path: Path, key: str) -> list[ReadItem]:
        """An object, or a tensor that is read whole."""
        storage = self.index.tensors.get(key)
        if storage is None:
            self.result.leaves.append(Leaf("object", number, name, path, {name: key}))
            return [object_item(key)]
        kind = "whole" if storage.size or number is None else "scalar"
        leaf = self._leaf(kind, number, name, path, {name: key}, storage)
        return self._read(leaf, key, storage, [(None, whole_chunk(storage))])

    def _check_live(
        self, number: int, param: ParamLayout, paths: set[Path], loaded: Sequence[Leaf]
    ) -> None:
        """Compare with the state that is loaded in place, and take its tensors as destinations."""
        state = self.live_of.get(number)
        if state is None:
            return
        mine = {leaf.path: leaf for leaf in loaded}
        for path, value in leaves(state):
            label = dotted((param.fqns[0], *path))
            if path not in paths:
                self.problems.append(f"{label}: not in the checkpoint")
                continue
            leaf = mine.get(path)
            if leaf is None or not isinstance(value, torch.Tensor) or leaf.kind == "object":
                continue
            if leaf.kind == "scalar" and not value.dim() and value.dtype == leaf.dtype:
                leaf.tensor = value.detach()
            if leaf.kind in ("local", "whole", "dtensor"):
                if tuple(value.shape) != leaf.shape:
                    self.problems.append(
                        f"{label}: expected the optimizer's tensor to have shape {leaf.shape}, "
                        f"found {tuple(value.shape)}"
                    )
                    leaf.kind = "skipped"
                elif value.dtype != leaf.dtype:
                    self.problems.append(
                        f"{label}: {leaf.dtype} in the checkpoint, {value.dtype} in the optimizer; "
                        f"load into an empty dict to take it as saved"
                    )
                    leaf.kind = "skipped"
                elif leaf.like is not None and not leaf.like.alike(value):
                    self.problems.append(
                        f"{label}: expected the optimizer's tensor to lie as {leaf.like.placements}"
                    )
                    leaf.kind = "skipped"
                else:
                    leaf.tensor, leaf.live = value.detach(), True


def _named(lines: Sequence[str]) -> str:
    """What the first of some problems is about."""
    return lines[0].partition(": ")[0] if lines else "what cannot be loaded"
