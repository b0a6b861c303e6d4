"""Memory for state that is about to be read into."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Sequence

import torch

__all__ = ["empty_for_reading"]

_HUGE_PAGE = 2 * 1024 * 1024
_MADV_HUGEPAGE = 14  # Linux; mmap.MADV_HUGEPAGE where Python was built with it


def empty_for_reading(
    shape: Sequence[int], dtype: torch.dtype | None, device: torch.device
) -> torch.Tensor:
    """``torch.empty``, on huge pages where Linux has them to give.

    Reading a file into fresh memory costs mostly page faults: 512 times fewer of them for
    tensors of 2 MiB and more. Only advice to the kernel; contents and size are ``torch.empty``'s.
    """
    tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
    if tensor.device.type == "cpu" and tensor.nbytes >= _HUGE_PAGE and sys.platform == "linux":
        start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        end = -(-(tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        madvise(start, end - start, _MADV_HUGEPAGE)  # refused advice costs nothing but time
    return tensor
