"""Tensors that are made without a device lie where ``torch.set_default_device`` or a surrounding
``with torch.device(...)`` says: in the middle of a save or load that would be the caller's GPU, or
``meta``, where they have no values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

__all__ = ["cpu_by_default"]


@contextlib.contextmanager
def cpu_by_default() -> Iterator[None]:
    """The CPU is the default device in here, whatever it is outside.  Also a decorator."""
    with contextlib.ExitStack() as stack:
        # (torch.get_default_device knows nothing of `with` before 2.7, and raises where 2.8 was
        # told None.)
        if torch.empty(0).device.type != "cpu":
            stack.enter_context(torch.device("cpu"))
        yield
