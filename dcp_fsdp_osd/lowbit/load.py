"""State that is quantized in blocks, on its way from a checkpoint into one rank's optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from dcp_fsdp_osd.checkpoint import CheckpointIndex
from dcp_fsdp_osd.errors import CorruptCheckpointError, Mismatch
from dcp_fsdp_osd.fsdp.optim import Target
from dcp_fsdp_osd.layout.flat import ParamKind, ParamLayout, param_id
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
from dcp_fsdp_osd.storage.places import KIND_OPAQUE, Places
from dcp_fsdp_osd.tree import Path, dotted, leaf_at, leaves, set_leaf, text_keys

__all__ = ["LowBitLoad"]

_AS_SAVED = "load into an empty dict to take it as saved"
_SAME_OPTIMIZER = "load with the optimizer and block_size of the save"


class _Mine(NamedTuple):
    """A current value, and how it is quantized; None if it is not."""

    how: Quantized | None
    value: torch.Tensor


class LowBitLoad:
    """The :class:`~dcp_fsdp_osd.load.protocol.StateCodec` of values that are quantized in blocks.

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
        self._index = index
        self._path = path
        self._optim = optim
        self._metadata = metadata if index.info is None else None
        self._saved: dict[int, dict[Path, Quantized]] = {}
        self._mine: dict[int, dict[Path, _Mine]] = {}
        for packed in index.info.quantized if index.info is not None else ():
            how = Quantized.unpack(packed)
            number = param_id(how.fqn, target.layout)
            if number is not None:
                param = target.layout.params[number]
                # one for other parts is a mismatch of per-rank state
                if how.signature in ("", param.signature) or _without_elements(param):
                    self._saved.setdefault(number, {})[how.path] = how

    def encode(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        states = {}
        for name, state in state_dict.get("state", {}).items():
            number = param_id(name, self._target.layout)
            states[name] = state if number is None else self._encode(number, state)
        return {**state_dict, "state": states} if states else state_dict

    def _encode(self, number: int, state: Any) -> Any:
        param = self._target.layout.params[number]
        saved, mine = self._saved.get(number, {}), self._mine.setdefault(number, {})
        encoded: dict[Path, dict[str, torch.Tensor]] = {}
        for path, value in leaves(state):
            if not path or not isinstance(value, torch.Tensor):
                continue
            local = local_part(value)
            if is_wrapper(local):
                parts = split(value, param, path)
                if parts is not None:
                    mine[path], encoded[path] = _Mine(parts[0], value), parts[1]
            elif path in saved and local.is_contiguous():
                mine[path] = _Mine(None, value)
                encoded[path] = {PLAIN: local.detach().view(-1)} if local.numel() else {}
        if not encoded:
            return state
        copied = text_keys(state)
        for path, inner in encoded.items():
            if inner:
                set_leaf(copied, path, inner)
            else:  # nothing to load; decode() puts it back
                leaf_at(copied, path[:-1]).pop(path[-1])
        return copied

    def decode(self, number: int, state: dict[Any, Any]) -> None:
        param = self._target.params[number]
        saved, mine = self._saved.get(number, {}), self._mine.get(number, {})
        for path in dict.fromkeys([*saved, *mine]):
            how, current, inner = saved.get(path), mine.get(path), leaf_at(state, path)
            if isinstance(inner, Mapping):
                first = next(iter(inner.values()))
                if current is not None and _same_memory(local_part(current.value), first):
                    set_leaf(state, path, current.value)
                elif how is not None:
                    set_leaf(state, path, join(how, inner, param))
            elif inner is None and current is not None:
                set_leaf(state, path, current.value)
            elif inner is None and how is not None and not local_part(param).numel():
                empty = torch.empty_like(local_part(param), dtype=how.torch_dtype)
                set_leaf(state, path, like_param(empty.detach(), param))

    def release(self) -> None:
        self._mine.clear()

    # ------------------------------------------------------------ planning

    def owns(self, number: int, path: Path) -> bool:
        return path[:-1] in self._saved.get(number, {})

    def interval(self, number: int, path: Path) -> tuple[int, int]:
        how, name = self._saved[number][path[:-1]], path[-1]
        whole = 0, self._index.tensors[self._key(how, name)].size.numel()
        if how.signature:
            return whole
        start, stop = interval(self._target.layout.params[number]) or (0, 0)
        end = self._blocks(how) * how.block_size
        quantized = start < stop <= end
        if name == PLAIN:
            return (0, 0) if quantized or start == stop else (start - end, stop - end)
        if not quantized:
            return 0, 0
        if name not in (CODES, SCALE):  # a table, the same for all
            return whole
        each = how.packed if name == CODES else 1
        return start // how.block_size * each, stop // how.block_size * each

    def _key(self, how: Quantized, name: str | int) -> str:
        return dotted((*self._path, "state", how.fqn, *how.path, name))

    def _blocks(self, how: Quantized) -> int:
        key = self._key(how, SCALE)
        if key not in self._index.tensors:
            raise CorruptCheckpointError(
                f"{key}: expected the scales of {how.describe()}, found no such tensor"
            )
        return self._index.tensors[key].size.numel()

    def _is_pickled(self, key: str) -> bool:
        """Whether a tensor that another planner saved has a chunk that is stored, uncompressed, in
        too few bytes for it."""
        storage = self._index.tensors.get(key)
        if self._metadata is None or storage is None:
            return False
        places = self._metadata.storage_data
        if isinstance(places, Places) and not places.holds(key, KIND_OPAQUE):
            return False
        places = places if isinstance(places, Mapping) else {}
        for chunk in storage.chunks:
            place = places.get(MetadataIndex(key, chunk.offsets))
            length = getattr(place, "length", None)
            if not isinstance(length, int) or getattr(place, "transform_descriptors", None):
                continue
            if length < chunk.sizes.numel() * (storage.properties.dtype or torch.uint8).itemsize:
                return True
        return False

    def check(self, number: int, keys: Mapping[str, Path], *, whole: bool) -> list[Mismatch]:
        param, saved = self._target.layout.params[number], self._saved.get(number, {})
        mismatches = [
            Mismatch(
                param.fqns[0],
                dotted(path),
                "saved with another planner in fewer bytes than it has elements of its dtype, as "
                "a tensor subclass (quantized in blocks, say) that a load would turn into a plain "
                "tensor",
                remedy="load it with DCP's default planner into get_optimizer_state_dict of the "
                "optimizer of the save, at the same sharding; set it, and save with "
                "FlatOptimSavePlanner",
            )
            for key, path in keys.items()
            if self._is_pickled(key)
        ]
        if whole:
            remedy = "load into an empty dict with form='flat', and that with optim.load_state_dict"
            return mismatches + [
                Mismatch(
                    how.fqn, dotted(path), f"{how.describe()} in the checkpoint", "", "", remedy
                )
                for path, how in saved.items()
                if not how.signature
            ]
        for path in dict.fromkeys([*saved, *self._mine.get(number, {})] if not mismatches else ()):
            how, mine = saved.get(path), self._mine.get(number, {}).get(path)
            words: tuple[str, ...] = ()
            if how is not None:
                words = next(self._problems(param, how, mine), ())
            elif mine is not None and mine.how is not None and path in keys.values():
                words = ("plain", f"{mine.how.describe()} in the optimizer", _AS_SAVED)
            if words:
                found, here, remedy = words
                mismatches.append(Mismatch(param.fqns[0], dotted(path), found, here, remedy=remedy))
        return mismatches

    def _problems(
        self, param: ParamLayout, how: Quantized, mine: _Mine | None
    ) -> Iterator[tuple[str, str, str]]:
        """What keeps a value from being loaded, the first of it first: found, here, remedy."""
        saved = how.describe()
        if param.kind is ParamKind.FLAT:
            remedy = "load under FSDP2 (fully_shard), DDP or in one process"
            yield saved, "which FSDP1's flat pieces cannot take", remedy
        elif how.shape != param.shapes[0]:
            yield f"shape {how.shape}", f"the parameter has {param.shapes[0]}", ""
        elif not _without_elements(param):
            yield from self._cut(param, how)
            yield from self._unlike(how, mine, self._quantized(param, how))

    def _cut(self, param: ParamLayout, how: Quantized) -> Iterator[tuple[str, str, str]]:
        """Whether this rank has whole blocks, or none."""
        saved, part = how.describe(), interval(param)
        if how.signature:
            return
        if part is None:
            here = f"but this rank's part ({param.describe()}) is no interval of elements"
            yield saved, here, "load at the sharding of the save"
            return
        start, stop = part
        end = self._blocks(how) * how.block_size
        within = f"(those from {end} on were not quantized) " if start < end < stop else ""
        if within or (stop <= end and (start % how.block_size or stop % how.block_size)):
            here = f"of which this rank's elements [{start}:{stop}] are not whole ones {within}"
            remedy = (
                "load at the world size and sharding of the save, or at one that leaves whole "
                "blocks to every rank"
            )
            yield saved, f"{here}and quantized elements are not cut", remedy

    def _quantized(self, param: ParamLayout, how: Quantized) -> bool:
        """Whether this rank's part was quantized."""
        part = interval(param)
        stop = part[1] if part is not None else 0
        return bool(how.signature) or stop <= self._blocks(how) * how.block_size

    def _unlike(
        self, how: Quantized, mine: _Mine | None, quantized: bool
    ) -> Iterator[tuple[str, str, str]]:
        """Whether the optimizer has, or makes, the same."""
        saved = how.describe() if quantized else f"plain torch.{how.dtype} on this rank"
        if mine is not None:
            here = mine.how.describe() if mine.how is not None else f"plain {mine.value.dtype}"
            here = f"{here} in the optimizer"
            if (mine.how is not None) != quantized:
                yield saved, f"{here} (which quantizes by the size of a rank's part)", _AS_SAVED
            elif mine.how is not None and not mine.how.same_kind(how):
                yield saved, here, _SAME_OPTIMIZER
        elif quantized:
            size, kind = self._optimizer_makes(how.block_size)
            if size != how.block_size or kind not in (None, how.find_type()):
                makes = f"{getattr(kind, '__name__', 'state')} in blocks of {size}"
                makes = "nothing quantized" if size is None else makes
                yield saved, f"but {type(self._optim).__name__} makes {makes}", _SAME_OPTIMIZER
        if quantized and how.find_type() is None:
            here = f"but {'.'.join(how.type)} is not imported"
            yield saved, here, "load with the optimizer of the save"

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


def _without_elements(param: ParamLayout) -> bool:
    return param.kind is not ParamKind.FLAT and interval(param) == (0, 0)


def _same_memory(local: torch.Tensor, first: torch.Tensor) -> bool:
    first_of = getattr(local, CODES) if is_wrapper(local) else local
    return bool(first_of.data_ptr() == first.data_ptr())
