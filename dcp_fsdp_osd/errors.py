"""Errors of this package, most general first.

Every one of them is an :class:`Exception`, so ``except Exception`` catches it.  Note
that DCP wraps what a rank raises in ``torch.distributed.checkpoint.api.CheckpointException``,
which is a ``BaseException``: its ``failures`` hold the error of each rank.
"""

from __future__ import annotations

__all__ = [
    "CheckpointMismatchError",
    "CorruptCheckpointError",
    "ExchangeError",
    "FlatOptimError",
    "LayoutError",
    "StorageError",
    "UnsafeCheckpointError",
    "UnsupportedTorchError",
]


class FlatOptimError(Exception):
    """Base of all errors that this package raises on purpose."""


class LayoutError(FlatOptimError, ValueError):
    """The model and the optimizer do not describe a layout that can be saved or loaded."""


class UnsupportedTorchError(FlatOptimError, RuntimeError):
    """A private attribute of torch that we need is absent or changed in this version."""


class CheckpointMismatchError(FlatOptimError, ValueError):
    """What the checkpoint holds is not what the model and optimizer want.

    The message lists every mismatch, not the first alone.
    """


class StorageError(FlatOptimError, OSError):
    """Storage failed, and retrying within the budget did not help."""


class ExchangeError(FlatOptimError, RuntimeError):
    """What was to be read once for several ranks did not get to all of them."""


class CorruptCheckpointError(StorageError):
    """Bytes of a checkpoint are missing, short or altered; names file, FQN, offset and rank."""


class UnsafeCheckpointError(FlatOptimError, ValueError):
    """A checkpoint wants to run code, or to reach outside of its own folder, when read."""
