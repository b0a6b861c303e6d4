"""Tensors as bytes: views of their own memory, scratch buffers, and flat ranges of strided tensors.

A view made here does not keep its tensor alive; whoever hands it to another thread keeps the
tensor too.
"""

from __future__ import annotations

import ctypes
import time

import torch

from dcp_fsdp_osd.layout.geometry import box_view, boxes_of_interval, narrowed_view

__all__ = [
    "DTYPES",
    "DTYPE_NAMES",
    "ScratchPool",
    "copy_bytes",
    "copy_flat_range",
    "has_streams",
    "is_plain",
    "revoke",
    "view_bytes",
]

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


DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def view_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, writable.  The caller keeps `tensor` alive."""
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return memoryview(bytearray())
    view: memoryview = _from_memory(tensor.data_ptr(), size, _BUF_WRITE)
    return view


def copy_bytes(target: memoryview, begin: int, source: memoryview, start: int, count: int) -> None:
    """Copy `count` bytes; other threads run meanwhile where they are many.

    Raises:
        ValueError: `target` was released.
    """
    if count < 1 << 15:
        target[begin : begin + count] = source[start : start + count]
        return
    to = (ctypes.c_char * count).from_buffer(target, begin)  # cannot be released before its end
    ctypes.memmove(to, (ctypes.c_char * count).from_buffer(source, start), count)
    del to


def revoke(views: list[memoryview]) -> None:
    """Release `views`, waiting for copies into them that are under way."""
    for view in views:
        while True:
            try:
                view.release()
            except BufferError:
                time.sleep(0.001)
            else:
                break


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
        and tensor.dtype in DTYPE_NAMES
    )


def copy_flat_range(
    tensor: torch.Tensor, start: int, flat: torch.Tensor, *, into_tensor: bool
) -> None:
    """Copy between a strided tensor's row-major elements from `start` on and the 1-D `flat`.

    Any stride, device and dtype on the tensor's side; dtypes convert as ``Tensor.copy_`` does.
    Copies from or to pinned memory are queued on the current stream and not waited for.
    """
    position = 0
    for box in boxes_of_interval(tensor.shape, start, start + flat.numel()):
        part = narrowed_view(tensor, box.offsets, box.sizes)
        piece = box_view(flat, position, box.sizes)
        if into_tensor:
            part.copy_(piece, non_blocking=True)
        else:
            piece.copy_(part, non_blocking=True)
        position += box.numel


_ONE_STREAM = ("mps",)  # accelerators to which a second stream cannot be made


def has_streams(device: torch.device) -> bool:
    """Whether it is the accelerator, which copies from and to pinned memory on any stream."""
    if device.type in ("cpu", *_ONE_STREAM) or not torch.accelerator.is_available():
        return False
    found = torch.accelerator.current_accelerator()
    return found is not None and found.type == device.type


class ScratchPool:
    """Host buffers that are used again, because touching fresh memory costs more than copying.

    Buffers are of `size` bytes (a larger request gets a buffer of its own, which is not kept), at
    most `keep` idle ones are held.  Pinned buffers are for copies from and to an accelerator.  Not
    thread-safe.
    """

    def __init__(self, size: int, keep: int) -> None:
        self._size = size
        self._keep = keep
        self._idle: dict[bool, list[torch.Tensor]] = {False: [], True: []}

    def take(self, size: int, device: torch.device | None = None) -> torch.Tensor:
        """A 1-D uint8 tensor of at least `size` bytes, 64-byte aligned, contents undefined.

        Pinned if it is for copies from or to an accelerator's `device`.
        """
        pinned = device is not None and has_streams(device)
        if size <= self._size and self._idle[pinned]:
            return self._idle[pinned].pop()
        return torch.empty(
            max(size, self._size), dtype=torch.uint8, device="cpu", pin_memory=pinned
        )

    def give(self, buffer: torch.Tensor) -> None:
        """Take a buffer back.  Nothing may read or write it any more."""
        idle = self._idle[torch.accelerator.is_available() and buffer.is_pinned()]
        if buffer.numel() == self._size and len(idle) < self._keep:
            idle.append(buffer)
