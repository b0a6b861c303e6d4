"""Errors of this package, most general first.

Every one of them is an :class:`Exception`, so ``except Exception`` catches it.  Note
that DCP wraps what a rank raises in ``torch.distributed.checkpoint.api.CheckpointException``,
which is a ``BaseException``: its ``failures`` hold the error of each rank.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

__all__ = [
    "CheckpointMismatchError",
    "CorruptCheckpointError",
    "ExchangeError",
    "FlatOptimError",
    "LayoutError",
    "Mismatch",
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


@dataclass(frozen=True)
class Mismatch:
    """One thing that is not alike in a checkpoint and in what is loaded; printed with ``str``.

    Attributes:
        fqn: the parameter, entry or key that it is about.
        state: dotted path of the state below that; ``""`` for all of it.
        found: what was found, in words; ``""`` for nothing in the checkpoint.
        current: what there is now in place of what was found in the checkpoint.
        expected: what was expected, where the above do not say it.
        remedy: what to do.
        ranks: that met it; ``()`` for all.
    """

    fqn: str
    state: str = ""
    found: str = ""
    current: str = ""
    expected: str = ""
    remedy: str = ""
    ranks: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.fqn}.{self.state}" if self.state else self.fqn

    @property
    def what(self) -> str:
        """In words, without the name of the thing."""
        text = self.found or "not in the checkpoint"
        if self.expected:
            text = f"expected {self.expected}, found {text}"
        elif self.current:
            text = f"{text} in the checkpoint, {self.current}"
        return f"{text}; {self.remedy}" if self.remedy else text

    def __str__(self) -> str:
        ranks = f" (ranks {', '.join(map(str, self.ranks))})" if self.ranks else ""
        return f"{self.name}: {self.what}{ranks}"


def listed(lines: Iterable[object], most: int = 10) -> str:
    """Lines for a message, indented below its first: no more than ``most``, and a count."""
    every = list(map(str, lines))
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
