"""FlatStager: what an asynchronous save is written from, copied once into memory that is kept.

``DefaultStager`` allocates anew for each save (unless told to share memory), and copies tensor by
tensor whole storages of which a state may show a part.  Here the tensors of a state dict, as they
are (flat pieces under FSDP1, local shards of DTensors), are copied next to each other into one
block, which the next save uses again.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dcp_fsdp_osd.allocate import empty_for_reading
from dcp_fsdp_osd.async_process import recover_async_process
from dcp_fsdp_osd.errors import LayoutError
from dcp_fsdp_osd.misuse.own_group import check_own_group, saves_by_process

__all__ = ["FlatStager"]

_ALIGNED = 64
_CPU = torch.device("cpu")


class FlatStager(AsyncStager):
    """Copies a state dict for ``dcp.async_save``, into memory that it keeps.

    Args:
        pin_memory: hold tensors of accelerators in pinned memory, which they are copied to at the
            full speed of the bus; by default where there is an accelerator.
        shared_memory: hold them in shared memory, for ``AsyncCheckpointerType.PROCESS``, whose
            process then reads them where they are; without it they are moved there at the first
            save. Not with `pin_memory`.

    Pass one to all saves, ``dcp.async_save(..., async_stager=stager)`` (torch 2.7; before, call
    :meth:`stage` and save what it returns), and call :meth:`close` after the last. What
    :meth:`stage` returned holds the memory for as long as it lives, which DCP's future ends; a save
    that begins before gets memory of its own, so let one end before the next begins.

    Dense tensors are copied (once, however often they occur), DTensors and other wrapper subclasses
    by what they wrap; everything else by ``copy.deepcopy``. Nothing that changes after
    :meth:`stage` has returned changes what it returned. Not thread-safe. No collective, but in a
    save by process :func:`~dcp_fsdp_osd.recover_async_process`.

    Replaces ``torch.distributed.checkpoint.staging.DefaultStager``.
    """

    _synchronize_after_execute = False

    def __init__(self, *, pin_memory: bool | None = None, shared_memory: bool = False) -> None:
        if pin_memory is None:
            pin_memory = torch.accelerator.is_available() and not shared_memory
        if pin_memory and shared_memory:
            raise ValueError("expected pin_memory or shared_memory, found both")
        if pin_memory and not torch.accelerator.is_available():
            raise ValueError("expected an accelerator for pin_memory=True, found none")
        self._pin, self._share = pin_memory, shared_memory
        self._blocks: list[_Block] = []

    def __repr__(self) -> str:
        held = sum(block.memory.nbytes for block in self._blocks)
        return (
            f"{type(self).__name__}(pin_memory={self._pin}, shared_memory={self._share}, "
            f"{held} bytes held)"
        )

    def stage(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of ``state_dict`` on the CPU, of the ``state_dict()`` of each Stateful in it.

        Raises:
            LayoutError: a value that cannot be copied, named by its key.
            ValueError: called by ``dcp.async_save`` over the group that training uses.
        """
        check_own_group()
        by_process = saves_by_process()
        if by_process is not None:
            recover_async_process(*by_process)
        state = {
            key: value.state_dict() if isinstance(value, Stateful) else value
            for key, value in state_dict.items()
        }
        tensors: dict[_Memory, torch.Tensor] = {}
        for value in _tensors(state):
            if _is_dense(value):
                tensors.setdefault(_memory(value), value)
        block = self._free_block(sum(map(_room, tensors.values())))
        copies: dict[_Memory, torch.Tensor] = {}
        at = 0
        for key, value in tensors.items():
            copies[key] = block.part(at, value)
            copies[key].copy_(value, non_blocking=self._pin)
            at += _room(value)
        if self._pin:
            for device in {value.device for value in tensors.values()} - {_CPU}:
                torch.accelerator.current_stream(device).synchronize()
        memo: dict[int, Any] = {}
        for value in _tensors(state, wrapped=False):
            memo[id(value)] = _copied(value, copies)
        staged = _Staged({key: _deepcopy(key, value, memo) for key, value in state.items()})
        block.lend(staged)
        return staged

    def synchronize_staging(self) -> None:
        """Nothing: :meth:`stage` returns when all is copied."""

    def close(self) -> None:
        """Let go of the memory; what is staged keeps its own until it is saved."""
        self._blocks.clear()

    def _free_block(self, size: int) -> _Block:
        free = [block for block in self._blocks if block.free]
        for block in free:
            if block.memory.nbytes >= size:
                return block
        for block in free:  # too small for this state: never again of use
            self._blocks.remove(block)
        free.clear()
        self._blocks.append(_Block(size, pin=self._pin, share=self._share))
        return self._blocks[-1]


class _Staged(dict[str, Any]):
    """A dict to which weak references can be made."""

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


class _Block:
    """Memory for one staged state dict."""

    def __init__(self, size: int, *, pin: bool, share: bool) -> None:
        if pin:
            self.memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        else:
            self.memory = empty_for_reading((size,), torch.uint8, _CPU)
        if share:
            self.memory.share_memory_()  # type: ignore[no-untyped-call]
        self._holder: weakref.ref[_Staged] | None = None

    @property
    def free(self) -> bool:
        return self._holder is None or self._holder() is None

    def lend(self, holder: _Staged) -> None:
        self._holder = weakref.ref(holder)

    def part(self, at: int, like: torch.Tensor) -> torch.Tensor:
        """A tensor of the size, dtype and, where it has no gaps, stride of ``like``."""
        flat = self.memory[at : at + like.nbytes].view(like.dtype)
        stride = torch.empty_like(like, device="meta").stride()
        return flat.as_strided(like.shape, stride)


_Memory = tuple[Any, ...]


def _memory(value: torch.Tensor) -> _Memory:
    """Equal for tensors that show the same memory in the same way, while they live."""
    view = value.shape, value.stride(), value.dtype, value.device
    conjugated = value.is_conj(), value.is_neg()
    return value.data_ptr() if value.numel() else 0, view, conjugated


def _room(value: torch.Tensor) -> int:
    return -(-value.nbytes // _ALIGNED) * _ALIGNED


def _is_dense(value: torch.Tensor) -> bool:
    plain = type(value) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    return plain and value.layout == torch.strided and not (value.is_meta or value.is_quantized)


def _is_wrapper(value: torch.Tensor) -> bool:
    return is_traceable_wrapper_subclass(value) and hasattr(type(value), "__tensor_unflatten__")


def _wrapped(value: Any) -> tuple[dict[str, Any], Any]:
    """What it is made of: tensors, and in newer torch a DTensor's mesh."""
    names, context = value.__tensor_flatten__()
    return {name: getattr(value, name) for name in names}, context


def _tensors(value: Any, *, wrapped: bool = True) -> Iterator[torch.Tensor]:
    """The tensors in dicts, lists and tuples; with ``wrapped``, in place of a wrapper subclass
    those that it wraps."""
    if isinstance(value, torch.Tensor):
        if wrapped and _is_wrapper(value):
            yield from _tensors(_wrapped(value)[0])
        else:
            yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each, wrapped=wrapped)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each, wrapped=wrapped)


def _copied(value: Any, copies: Mapping[_Memory, torch.Tensor]) -> Any:
    if not isinstance(value, torch.Tensor) or value.is_meta:
        return value  # (a tensor on meta is refused by the planner)
    if _is_dense(value):
        return copies[_memory(value)]
    if _is_wrapper(value):
        inner, context = _wrapped(value)
        kind: Any = type(value)
        return kind.__tensor_unflatten__(
            {name: _copied(tensor, copies) for name, tensor in inner.items()},
            context,
            value.shape,
            value.stride(),
        )
    return copy.deepcopy(value.detach())


def _deepcopy(key: str, value: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception as error:
        raise LayoutError(
            f"{key}: expected values that can be copied, so that they may change while they are "
            f"saved, found that copy.deepcopy of what is under this key fails: "
            f"{type(error).__name__}: {error}. Save what it can be made of again"
        ) from error
