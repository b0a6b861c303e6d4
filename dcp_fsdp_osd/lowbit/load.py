"""State that is quantized in blocks, on its way from a checkpoint into one rank's optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from dcp_fsdp_osd.checkpoint import CheckpointIndex
from dcp_fsdp_osd.errors import CorruptCheckpointError
from dcp_fsdp_osd.fsdp.optim import Target
from dcp_fsdp_osd.layout.flat import FlatLayout, ParamKind, ParamLayout, param_id
from dcp_fsdp_osd.layout.placements import like_param
from dcp_fsdp_osd.lowbit.blocks import (
    CODES,
    PLAIN,
    SCALE,
    Quantized,
    interval,
    is_wrapper,
    join,
    local_part,
    split,
)
from dcp_fsdp_osd.tree import Path, dotted, leaf_at, leaves, set_leaf, text_keys

__all__ = ["QuantizedLoad", "quantized_states"]


_Live = tuple[Quantized | None, torch.Tensor]
"""How a live value is quantized, None if it is not; and the value."""


def quantized_states(
    packed: Sequence[Mapping[str, Any]], layout: FlatLayout
) -> dict[tuple[int, Path], list[Quantized]]:
    """Parameter and path -> how the state there was saved (once, or once for each part)."""
    found: dict[tuple[int, Path], list[Quantized]] = {}
    for each in packed:
        how = Quantized.unpack(each)
        number = param_id(how.fqn, layout)
        if number is not None:
            found.setdefault((number, how.path), []).append(how)
    return found


class QuantizedLoad:
    """Knows which values are quantized in a checkpoint, and which in the live state dict.

    Call order: ``split`` on what is loaded into; ``check`` and ``span`` while the reads are
    planned; ``join`` on each parameter's state when they are done.

    Args:
        index, metadata: of the checkpoint.
        path: of the optimizer in the checkpoint.
        optim: for its ``block_size``, where it has no state yet.
    """

    def __init__(
        self,
        target: Target,
        index: CheckpointIndex,
        metadata: Metadata,
        path: Path,
        optim: torch.optim.Optimizer,
    ) -> None:
        self._target = target
        self._tensors = index.tensors
        self._path = path
        self._optim = optim
        self._saved: dict[int, dict[Path, Quantized]] = {}
        packed = index.info.quantized if index.info is not None else ()
        self._pickled = _pickled(metadata, index.tensors) if index.info is None else set()
        for (number, where), hows in quantized_states(packed, target.layout).items():
            param = target.layout.params[number]
            own = ("", param.signature)
            for how in hows:  # one for other parts is a problem that the opaque state tells
                if how.signature in own or self.without_elements(param):
                    self._saved.setdefault(number, {})[where] = how
        self._live: dict[int, dict[Path, _Live]] = {}

    # ------------------------------------------------------------ what is loaded into

    def split(self, live: dict[str, Any]) -> dict[str, Any]:
        """A copy of a state dict with its quantized values taken apart; tensors are shared."""
        states = {}
        for name, state in live.get("state", {}).items():
            number = param_id(name, self._target.layout)
            states[name] = state if number is None else self._split(number, state)
        return {**live, "state": states} if states else live

    def _split(self, number: int, state: Any) -> Any:
        param = self._target.layout.params[number]
        saved, mine = self._saved.get(number, {}), self._live.setdefault(number, {})
        parts: dict[Path, dict[str, torch.Tensor]] = {}
        for path, value in leaves(state):
            if not path or not isinstance(value, torch.Tensor):
                continue
            local = local_part(value)
            if is_wrapper(local):
                found = split(value, param, path)
                if found is not None:
                    mine[path], parts[path] = (found[0], value), found[1]
            elif path in saved and local.is_contiguous():
                mine[path] = None, value
                parts[path] = {PLAIN: local.detach().view(-1)} if local.numel() else {}
        if not parts:
            return state
        copied = text_keys(state)
        for path, inner in parts.items():
            if inner:
                set_leaf(copied, path, inner)
            else:  # nothing to load; join() puts it back
                leaf_at(copied, path[:-1]).pop(path[-1])
        return copied

    def _values(self, number: int) -> list[tuple[Path, Quantized | None, _Live | None]]:
        """Each quantized value of a parameter, as it is saved and as it is live."""
        saved, live = self._saved.get(number, {}), self._live.get(number, {})
        return [(path, saved.get(path), live.get(path)) for path in dict.fromkeys([*saved, *live])]

    # ------------------------------------------------------------ planning

    def check(self, number: int, keys: Mapping[str, Path]) -> list[str]:
        """What keeps this rank from loading the quantized state of a parameter, a line each.

        Args:
            keys: key -> path of all that the checkpoint has of this parameter.

        Raises:
            CorruptCheckpointError: a tensor of a quantized state is not there.
        """
        param = self._target.layout.params[number]
        problems = self._other_planners(number, keys)
        if problems:
            return problems
        for path, how, live in self._values(number):
            label = dotted((param.fqns[0], *path))
            if how is not None:
                problem = self._problem(param, how, live)
            elif live is not None and live[0] is not None and path in keys.values():
                problem = (
                    f"plain in the checkpoint, {live[0].describe()} in the optimizer; load into "
                    f"an empty dict to take it as saved"
                )
            else:
                problem = ""
            if problem:
                problems.append(f"{label}: {problem}")
        return problems

    def _problem(
        self,
        param: ParamLayout,
        how: Quantized,
        live: _Live | None,
    ) -> str:
        saved = f"{how.describe()} in the checkpoint"
        if param.kind is ParamKind.FLAT:
            return (
                f"{saved}, which FSDP1's flat pieces cannot take; load under FSDP2 "
                f"(fully_shard), DDP or in one process"
            )
        if how.shape != param.shapes[0]:
            return f"shape {how.shape} in the checkpoint, the parameter has {param.shapes[0]}"
        if self.without_elements(param):
            return ""
        if how.signature:
            quantized = True
        else:
            part = interval(param)
            if part is None:
                return (
                    f"{saved}, but this rank's part ({param.describe()}) is no interval of "
                    f"elements; load at the sharding of the save"
                )
            start, stop = part
            end = self._quantized_elements(how)
            quantized = stop <= end
            if (quantized and (start % how.block_size or stop % how.block_size)) or (
                start < end < stop
            ):
                return (
                    f"{saved}, of which this rank's elements [{start}:{stop}] are not whole ones "
                    + (f"(those from {end} on were not quantized) " if start < end < stop else "")
                    + "and quantized elements are not cut; load at the world size and sharding of "
                    "the save, or at one that leaves whole blocks to every rank"
                )
        return self._kind_problem(how, live, quantized)

    def _kind_problem(
        self,
        how: Quantized,
        live: _Live | None,
        quantized: bool,
    ) -> str:
        saved = how.describe() if quantized else f"plain torch.{how.dtype} on this rank"
        as_saved = "load into an empty dict to take it as saved"
        if live is not None:
            mine, value = live
            if (mine is not None) != quantized:
                here = mine.describe() if mine is not None else f"plain {value.dtype}"
                return (
                    f"{saved} in the checkpoint, {here} in the optimizer (which quantizes by the "
                    f"size of a rank's part); {as_saved}"
                )
            if mine is not None and not mine.same_kind(how):
                return (
                    f"{saved} in the checkpoint, {mine.describe()} in the optimizer; load with "
                    f"the optimizer and block_size of the save"
                )
        elif quantized:
            size, kind = self._optimizer_makes(how.block_size)
            if size != how.block_size or kind not in (None, how.find_type()):
                makes = getattr(kind, "__name__", "state")
                return (
                    f"{saved} in the checkpoint, but {type(self._optim).__name__} makes "
                    + ("nothing quantized" if size is None else f"{makes} in blocks of {size}")
                    + "; load with the optimizer and block_size of the save"
                )
        if quantized and how.find_type() is None:
            return (
                f"{saved} in the checkpoint, but {'.'.join(how.type)} is not imported; load "
                f"with the optimizer of the save"
            )
        return ""

    def _optimizer_makes(self, block_size: int) -> tuple[Any, type | None]:
        """The block size of the optimizer, and the subclass of its state where it tells that.

        ``_subclass_zeros`` is what torchao has its optimizers define; others need not.
        """
        make = getattr(self._optim, "_subclass_zeros", None)
        kind = None
        if callable(make):
            with contextlib.suppress(NotImplementedError, TypeError):
                kind = type(make(torch.empty(block_size), True, block_size))
        return getattr(self._optim, "block_size", None), kind

    def _quantized_elements(self, how: Quantized) -> int:
        key = dotted((*self._path, "state", how.fqn, *how.path, SCALE))
        if key not in self._tensors:
            raise CorruptCheckpointError(
                f"{key}: expected the scales of {how.describe()}, found no such tensor"
            )
        return self._tensors[key].size.numel() * how.block_size

    def without_elements(self, param: ParamLayout) -> bool:
        return param.kind is not ParamKind.FLAT and interval(param) == (0, 0)

    def check_whole(self, number: int, keys: Mapping[str, Path]) -> list[str]:
        """What keeps a parameter's state from being loaded as tensors of its whole shape."""
        return self._other_planners(number, keys) + [
            f"{dotted((how.fqn, *how.path))}: {how.describe()} in the checkpoint; load into an "
            f"empty dict with form='flat', and that with optim.load_state_dict"
            for how in self._saved.get(number, {}).values()
            if not how.signature
        ]

    def _other_planners(self, number: int, keys: Mapping[str, Path]) -> list[str]:
        """Readers turn pickled subclasses into plain tensors without a word."""
        fqn = self._target.layout.params[number].fqns[0]
        return [
            f"{dotted((fqn, *path))}: saved with another planner in fewer bytes than it has "
            f"elements of its dtype, as a tensor subclass (quantized in blocks, say) that a load "
            f"would turn into a plain tensor. Load it with DCP's default planner into "
            f"get_optimizer_state_dict of the optimizer of the save, at the same sharding; set it, "
            f"and save with FlatOptimSavePlanner"
            for key, path in keys.items()
            if key in self._pickled
        ]

    def owns(self, number: int | None, path: Path) -> bool:
        """Whether an entry at ``path`` is a part of a value that is saved as quantized."""
        return number is not None and path[:-1] in self._saved.get(number, {})

    def span(self, number: int, path: Path, storage: TensorStorageMetadata) -> tuple[int, int]:
        """The elements of the entry at ``path`` that this rank reads; for what :meth:`check` finds
        nothing wrong with."""
        how = self._saved[number][path[:-1]]
        part = interval(self._target.layout.params[number])
        if how.signature:
            return 0, storage.size.numel()
        start, stop = part or (0, 0)
        end = self._quantized_elements(how)
        quantized = start < stop <= end
        if path[-1] == PLAIN:
            return (0, 0) if quantized or start == stop else (start - end, stop - end)
        if not quantized:
            return 0, 0
        if path[-1] not in (CODES, SCALE):
            return 0, storage.size.numel()
        each = how.packed if path[-1] == CODES else 1
        return start // how.block_size * each, stop // how.block_size * each

    # ------------------------------------------------------------ the finished state

    def join(self, number: int, state: dict[Any, Any]) -> None:
        """Put the values of a parameter's ``state`` together again, in place.

        What was loaded in place is the optimizer's own value, where it is the same memory.
        """
        param = self._target.params[number]
        for path, how, live in self._values(number):
            inner = leaf_at(state, path)
            if isinstance(inner, Mapping):
                first = next(iter(inner.values()))
                if live is not None and _same_memory(local_part(live[1]), first):
                    set_leaf(state, path, live[1])
                elif how is not None:
                    set_leaf(state, path, join(how, inner, param))
            elif inner is None and live is not None:
                set_leaf(state, path, live[1])
            elif inner is None and how is not None and not local_part(param).numel():
                empty = torch.empty_like(local_part(param), dtype=how.torch_dtype)
                set_leaf(state, path, like_param(empty.detach(), param))

    def release(self) -> None:
        """Let go of the optimizer's values."""
        self._live.clear()


def _pickled(metadata: Metadata, tensors: Mapping[str, TensorStorageMetadata]) -> set[str]:
    """Keys of tensors with a chunk that is stored, uncompressed, in too few bytes for it."""
    found = set()
    places = metadata.storage_data if isinstance(metadata.storage_data, Mapping) else {}
    for key, storage in tensors.items():
        for chunk in storage.chunks:
            place = places.get(MetadataIndex(key, chunk.offsets))
            length = getattr(place, "length", None)
            if not isinstance(length, int) or getattr(place, "transform_descriptors", None):
                continue
            if length < chunk.sizes.numel() * (storage.properties.dtype or torch.uint8).itemsize:
                found.add(key)
    return found


def _same_memory(local: torch.Tensor, first: torch.Tensor) -> bool:
    first_of = getattr(local, CODES) if is_wrapper(local) else local
    return bool(first_of.data_ptr() == first.data_ptr())
