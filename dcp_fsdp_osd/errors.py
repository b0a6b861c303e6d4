"""Errors of this package, most general first.

Every one of them is an :class:`Exception`, so ``except Exception`` catches it.  Note
that DCP wraps what a rank raises in ``torch.distributed.checkpoint.api.CheckpointException``,
which is a ``BaseException``: its ``failures`` hold the error of each rank.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterable, Iterator, Sequence

__all__ = [
    "CheckpointMismatchError",
    "CorruptCheckpointError",
    "ExchangeError",
    "FlatOptimError",
    "LayoutError",
    "StorageError",
    "UnsafeCheckpointError",
    "UnsupportedTorchError",
    "listed",
    "message_of",
    "portable_errors",
    "several",
    "survives_pickling",
]


class FlatOptimError(Exception):
    """Base of all errors that this package raises on purpose."""


class LayoutError(FlatOptimError, ValueError):
    """The model and the optimizer do not describe a layout that can be saved or loaded."""


class UnsupportedTorchError(FlatOptimError, RuntimeError):
    """A private attribute of torch that we need is absent or changed in this version."""


class CheckpointMismatchError(FlatOptimError, ValueError):
    """What the checkpoint holds is not what the model and optimizer want.

    The message lists ten mismatches and counts the others, not the first alone.
    """


class StorageError(FlatOptimError, OSError):
    """Storage failed, and retrying within the budget did not help."""


class ExchangeError(FlatOptimError, RuntimeError):
    """What was to be read once for several ranks did not get to all of them."""


class CorruptCheckpointError(StorageError):
    """Bytes of a checkpoint are missing, short or altered; names file, FQN, offset and rank."""


class UnsafeCheckpointError(FlatOptimError, ValueError):
    """A checkpoint wants to run code, or to reach outside of its own folder, when read."""


def listed(lines: Iterable[str], most: int = 10) -> str:
    """Lines for a message, indented below its first: no more than ``most``, and a count."""
    every = list(lines)
    more = [f"... and {len(every) - most} more"] if len(every) > most else []
    return "\n  ".join(every[:most] + more)


def several(names: Sequence[str], most: int = 10) -> str:
    """Names within a line of a message: no more than ``most``, and a count."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def survives_pickling(error: BaseException) -> bool:
    """Whether other ranks can be told of it.

    DCP pickles a rank's error to all others; one that it cannot pickle, or they not unpickle,
    leaves them waiting.
    """
    try:
        return type(pickle.loads(pickle.dumps(error))) is type(error)
    except Exception:  # whatever an error's own methods raise
        return False


def message_of(error: BaseException) -> str:
    """Its text, whatever its own methods do."""
    try:
        return str(error)
    except Exception:
        return "an error that cannot be shown"


@contextlib.contextmanager
def portable_errors() -> Iterator[None]:
    """Around (or, as a decorator, for) what DCP calls: errors that cannot be pickled go as text."""
    try:
        yield
    except BaseException as error:
        if survives_pickling(error):
            raise
        kind = f"{type(error).__module__}.{type(error).__qualname__}"
        raise FlatOptimError(f"{kind}: {message_of(error)[:10_000]}") from error
