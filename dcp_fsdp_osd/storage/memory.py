"""Tensors as bytes: views of their own memory, scratch buffers, and flat ranges of strided tensors.

A view made here does not keep its tensor alive; whoever hands it to another thread keeps the
tensor too.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator

import torch

__all__ = ["DTYPES", "ScratchPool", "copy_flat_range", "flat_boxes", "is_plain", "view_bytes"]

_BUF_WRITE = 0x200  # PyBUF_WRITE
_from_memory = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)

# The dtypes whose elements are whole bytes and nothing else, by name, as far as torch has them.
# Quantized dtypes carry more than their bytes; sub-byte ones have no fixed packing.
_DTYPE_NAMES = (
    "bfloat16 bool complex128 complex64 float16 float32 float64 float8_e4m3fn "
    "float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu int16 int32 int64 int8 uint16 "
    "uint32 uint64 uint8"
)
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in _DTYPE_NAMES.split() if hasattr(torch, name)
}


def view_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, writable.  The caller keeps `tensor` alive."""
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return memoryview(bytearray())
    view: memoryview = _from_memory(tensor.data_ptr(), size, _BUF_WRITE)
    return view


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the elements' bytes, row-major, are all there is to the tensor.

    False for subclasses (which may hold several tensors), sparse and quantized layouts, and lazy
    conjugates and negatives.
    """
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and tensor.device.type != "meta"
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and str(tensor.dtype).removeprefix("torch.") in DTYPES
    )


def flat_boxes(
    sizes: tuple[int, ...], start: int, end: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Elements [start, end) of a row-major tensor as (offsets, lengths) boxes, in order.

    At most 2N-1 of them for N dimensions.
    """
    if start >= end:
        return
    if len(sizes) <= 1:
        yield ((start,), (end - start,)) if sizes else ((), ())
        return
    row = math.prod(sizes[1:])
    first, last = start // row, (end - 1) // row

    def part(index: int, a: int, b: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        for offsets, lengths in flat_boxes(sizes[1:], a, b):
            yield (index, *offsets), (1, *lengths)

    if first == last:
        if start == first * row and end == (first + 1) * row:
            yield (first, *(0 for _ in sizes[1:])), (1, *sizes[1:])
        else:
            yield from part(first, start - first * row, end - first * row)
        return
    if start > first * row:
        yield from part(first, start - first * row, row)
        first += 1
    whole_end = end // row
    if whole_end > first:
        yield (first, *(0 for _ in sizes[1:])), (whole_end - first, *sizes[1:])
    if whole_end * row < end:
        yield from part(whole_end, 0, end - whole_end * row)


def copy_flat_range(
    tensor: torch.Tensor, start: int, flat: torch.Tensor, *, into_tensor: bool
) -> None:
    """Copy between a strided tensor's row-major elements from `start` on and the 1-D `flat`.

    Any stride, device and dtype on the tensor's side; dtypes convert as ``Tensor.copy_`` does.
    Copies from or to pinned memory are queued on the current stream and not waited for.
    """
    position = 0
    for offsets, lengths in flat_boxes(tuple(tensor.shape), start, start + flat.numel()):
        box = tensor
        for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
            box = box.narrow(dim, offset, length)
        count = math.prod(lengths)
        piece = flat[position : position + count].view(lengths)
        if into_tensor:
            box.copy_(piece, non_blocking=True)
        else:
            piece.copy_(box, non_blocking=True)
        position += count


class ScratchPool:
    """Host buffers that are used again, because touching fresh memory costs more than copying.

    Buffers are of `size` bytes (a larger request gets a buffer of its own, which is not kept), at
    most `keep` idle ones are held.  Pinned buffers are for copies from and to a GPU.  Not
    thread-safe.
    """

    def __init__(self, size: int, keep: int) -> None:
        self._size = size
        self._keep = keep
        self._idle: dict[bool, list[torch.Tensor]] = {False: [], True: []}

    def take(self, size: int, device: torch.device | None = None) -> torch.Tensor:
        """A 1-D uint8 tensor of at least `size` bytes, 64-byte aligned, contents undefined.

        Pinned if it is for copies from or to a CUDA `device`.
        """
        pinned = device is not None and device.type == "cuda"
        if size <= self._size and self._idle[pinned]:
            return self._idle[pinned].pop()
        return torch.empty(max(size, self._size), dtype=torch.uint8, pin_memory=pinned)

    def give(self, buffer: torch.Tensor) -> None:
        """Take a buffer back.  Nothing may read or write it any more."""
        idle = self._idle[buffer.is_pinned() if torch.cuda.is_available() else False]
        if buffer.numel() == self._size and len(idle) < self._keep:
            idle.append(buffer)
