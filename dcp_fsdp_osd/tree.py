"""State dicts as trees: paths, leaves, digests of values, where optimizers lie.  Pure."""

from __future__ import annotations

import ctypes
import hashlib
import io
import itertools
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from dcp_fsdp_osd.errors import LayoutError

__all__ = [
    "Path",
    "dicts",
    "digest",
    "digest_scalars",
    "dotted",
    "find_optim",
    "fingerprint",
    "holds_tensor",
    "is_entered_list",
    "leaf_at",
    "leaves",
    "lies_on_meta",
    "put_in_place",
    "set_leaf",
    "text_keys",
    "value_at",
    "with_optim_removed",
]

Path = tuple[str | int, ...]


def dotted(path: Sequence[str | int]) -> str:
    """The key of a path in a flattened state dict, as DCP forms it."""
    return ".".join(map(str, path))


def dicts(
    value: Mapping[Any, Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Mapping[Any, Any]]]:
    """The mappings within nested mappings, with their paths, the outer ones first."""
    for key, item in value.items():
        if isinstance(item, Mapping):
            yield (*path, str(key)), item
            yield from dicts(item, (*path, str(key)))


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The values of a nested state dict with their paths, cut where DCP's flattening cuts.

    Mappings are entered, lists only where a tensor or a mapping lies in them
    (``torch.distributed.checkpoint._nested_dict.flatten_state_dict``).
    """
    if isinstance(value, Mapping):
        if not value and path:  # an empty one is a value; of what kind is told elsewhere
            yield path, {}
        for name, item in value.items():
            yield from leaves(item, (*path, str(name)))
    elif is_entered_list(value):
        for i, item in enumerate(value):
            yield from leaves(item, (*path, i))
    else:
        yield path, value


def holds_tensor(value: Any) -> bool:
    """Whether a tensor with elements of its own (no scalar) lies in nested containers."""
    if isinstance(value, torch.Tensor):
        return value.dim() > 0
    if isinstance(value, Mapping):
        return any(map(holds_tensor, value.values()))
    return isinstance(value, list | tuple | set) and any(map(holds_tensor, value))


def lies_on_meta(value: Any) -> bool:
    """Whether a tensor without values lies in nested containers."""
    if isinstance(value, ShardedTensor):
        return any(shard.tensor.is_meta for shard in value.local_shards())
    if isinstance(value, torch.Tensor):
        return value.is_meta
    if isinstance(value, Mapping):
        return any(map(lies_on_meta, value.values()))
    return isinstance(value, list | tuple | set) and any(map(lies_on_meta, value))


def is_entered_list(value: Any) -> bool:
    """Whether the items of ``value`` are values of their own, and not one together."""
    return isinstance(value, list) and any(_holds_state(item) for item in value)


def _holds_state(value: Any) -> bool:
    if isinstance(value, list):
        return any(_holds_state(item) for item in value)
    return isinstance(value, torch.Tensor | Mapping | ShardedTensor)


def set_leaf(root: dict[Any, Any], path: Path, value: Any) -> None:
    """Put ``value`` at ``path`` below ``root``, making mappings and lists on the way."""
    here: Any = root
    for step, following in itertools.pairwise(path):
        empty: Any = [] if isinstance(following, int) else {}
        if isinstance(step, int):
            here.extend([None] * (step + 1 - len(here)))
            there = here[step]
        else:
            there = here.get(step)
        if not isinstance(there, type(empty)):
            there = here[step] = empty
        here = there
    last = path[-1]
    if isinstance(last, int):
        here.extend([None] * (last + 1 - len(here)))
    here[last] = value


def leaf_at(root: Any, path: Path, default: Any = None) -> Any:
    """What lies at ``path`` of nested mappings; ``default`` if there is nothing."""
    for step in path:
        if not isinstance(root, Mapping) or step not in root:
            return default
        root = root[step]
    return root


def text_keys(value: Any) -> Any:
    """A copy of nested mappings and lists, with dicts whose keys are text; shares other values."""
    if isinstance(value, Mapping):
        return {str(k): text_keys(v) for k, v in value.items()}
    return [text_keys(v) for v in value] if is_entered_list(value) else value


def put_in_place(root: Any, path: Path, value: Any) -> bool:
    """Put ``value`` where a path of text leads in nested mappings and lists, whatever their keys
    are. False, and nothing done, if there is no such place."""
    for i, step in enumerate(path):
        key: Any = step
        if isinstance(root, Mapping) and step not in root:
            key = next((k for k in root if str(k) == str(step)), None)
        last = i == len(path) - 1
        try:
            if last:
                root[key]
                root[key] = value
            else:
                root = root[key]
        except (LookupError, TypeError):
            return False
    return bool(path)


def digest(value: Any) -> str:
    """Equal for equal values, tensors bit for bit; a tensor's device does not count."""
    try:
        text = _Digest().text(value)
    except _Unwalkable:  # it holds itself: then which parts are the same object counts too
        try:
            text = _Digest().pickled(value, by_value=(torch.Tensor,))
        except _Unwalkable:  # it is refused where it is written
            text = f"unpicklable {type(value).__qualname__}".encode()
    return hashlib.sha256(text).hexdigest()[:16]


class _Unwalkable(Exception):
    """A value holds itself, or something that cannot be pickled, or a tensor without strides."""


class _Digest:
    """What values are, in bytes, whatever parts of them are the same object; for one value.

    Pickle's own bytes tell which parts are, and the order of sets. A part that is met again is not
    walked again.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, bytes]] = {}  # id -> the value, kept alive, and its hash
        self._open: set[int] = set()

    def text(self, value: Any) -> bytes:  # noqa: PLR0911
        if isinstance(value, DTensor):
            return f"{value.placements}{tuple(value.shape)}".encode() + self.text(value.to_local())
        if isinstance(value, torch.Tensor):
            if value.layout != torch.strided:
                raise _Unwalkable
            plain = value.detach().cpu().contiguous()
            data = ctypes.string_at(plain.data_ptr(), plain.nbytes) if plain.numel() else b""
            return f"{plain.dtype}{tuple(plain.shape)}".encode() + data
        if isinstance(value, Mapping):
            items = (self.part(k) + b":" + self.part(v) for k, v in value.items())
            return b"{" + b",".join(sorted(items)) + b"}"
        if isinstance(value, set | frozenset):
            return b"set" + b",".join(sorted(map(self.part, value)))
        if isinstance(value, list | tuple):
            return type(value).__name__.encode() + b"[" + b",".join(map(self.part, value)) + b"]"
        if value is None or isinstance(value, bool | int | float | complex | str | bytes):
            return f"{type(value).__name__} {value!r}".encode()
        return self.pickled(value, by_value=(torch.Tensor, dict, set, frozenset))

    def part(self, value: Any) -> bytes:
        """The hash of :meth:`text`."""
        key = id(value)
        if key in self._known:
            return self._known[key][1]
        if key in self._open:
            raise _Unwalkable
        self._open.add(key)
        try:
            found = hashlib.sha256(self.text(value)).digest()
        finally:
            self._open.discard(key)
        self._known[key] = value, found
        return found

    def pickled(self, value: Any, *, by_value: tuple[type, ...]) -> bytes:
        """Its pickle, but for parts that are `by_value`."""
        stream = io.BytesIO()
        pickler = _Pickler(stream, protocol=4)
        pickler.by_value, pickler.part = by_value, self.part
        pickler.fast = dict in by_value  # equal parts are written alike, the same or not
        try:
            pickler.dump(value)
        except Exception as error:
            raise _Unwalkable from error
        return stream.getvalue()


class _Pickler(pickle.Pickler):
    """Writes parts of some types by the hash of their value."""

    by_value: tuple[type, ...]
    part: Callable[[Any], bytes]

    def persistent_id(self, value: Any) -> bytes | None:
        exact = type(value) in self.by_value
        return self.part(value) if exact or isinstance(value, torch.Tensor) else None


_SMALL = 1 << 20  # bytes of a tensor of which each counts


def fingerprint(value: Any) -> str:
    """As :func:`digest`, at the speed of memory for large tensors: of these the sum of every 256
    64-bit words' bits counts, so that values that change places within those go unnoticed."""
    if (
        not isinstance(value, torch.Tensor)
        or value.layout != torch.strided
        or value.nbytes <= _SMALL
    ):
        return digest(value)
    flat = value.detach().contiguous().view(-1)
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()
    whole = flat.numel() - flat.numel() % (2048 // flat.element_size())
    sums = flat[:whole].view(torch.int64).view(-1, 256).sum(dim=1)
    return digest([str(value.dtype), tuple(value.shape), sums, flat[whole:]])


def digest_scalars(values: Mapping[str, Any]) -> dict[str, str]:
    """Digests of the small values among ``values``, by key; one transfer per device and dtype."""
    batches: dict[tuple[torch.device, torch.dtype], dict[int, torch.Tensor]] = {}
    for value in values.values():
        if _is_scalar(value):
            batches.setdefault((value.device, value.dtype), {})[id(value)] = value.detach()
    digests: dict[int, str] = {}
    for tensors in batches.values():
        on_cpu = torch.stack(list(tensors.values())).cpu()
        step, known = on_cpu.element_size(), {}
        data = ctypes.string_at(on_cpu.data_ptr(), on_cpu.nbytes)
        for number, of in enumerate(tensors):
            bits = data[step * number : step * (number + 1)]
            if bits not in known:  # those of one step are alike
                known[bits] = digest(on_cpu[number])
            digests[of] = known[bits]
    result = {}
    for name, value in values.items():
        if id(value) in digests:
            result[name] = digests[id(value)]
        elif not isinstance(value, torch.Tensor | ShardedTensor):
            result[name] = digest(value)
    return result


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and not value.dim()


_NOTHING = object()


def value_at(state_dict: Mapping[str, Any], key: str) -> tuple[tuple[str, ...], Any]:
    """Path and value of ``key``, or of keys joined by dots; a value of no kind if there is none."""
    path = (key,) if key in state_dict else tuple(key.split("."))
    return path, leaf_at(state_dict, path, _NOTHING)


def find_optim(state_dict: Mapping[str, Any], key: str) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The optimizer's state dict under ``key``, and its path.

    Args:
        key: a key of ``state_dict``, or keys joined by dots for a nested place (``"app.optim"``).

    Raises:
        LayoutError: nothing is there, or something that is no dict.
    """
    path, value = value_at(state_dict, key)
    if value is _NOTHING:
        raise LayoutError(
            f"expected the optimizer's state dict under {key!r}, found only "
            f"{sorted(map(str, state_dict))}; pass key= to the planner"
        )
    if not isinstance(value, dict):
        raise LayoutError(
            f"expected the state dict of an optimizer under {key!r} (optim.state_dict(), a "
            f"FlatOptimState, or for a load an empty dict), found {type(value).__name__}. For "
            f"several optimizers pass the planner a mapping from key to optimizer"
        )
    return path, value


def with_optim_removed(
    state_dict: Mapping[str, Any], paths: Sequence[tuple[str, ...]]
) -> dict[str, Any]:
    """A copy of ``state_dict`` without what lies at ``paths``; other values are shared."""
    result = dict(state_dict)
    for path in paths:
        here = result
        for step in path[:-1]:
            here[step] = dict(here[step])
            here = here[step]
        del here[path[-1]]
    return result
