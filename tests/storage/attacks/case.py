"""An attack and what must come of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dcp_fsdp_osd.errors import FlatOptimError
from tests.storage.conftest import Place

__all__ = ["EVERYWHERE", "Attack", "Gives", "Refused"]

EVERYWHERE = ("local", "s3fs", "obstore")


@dataclass(frozen=True)
class Refused:
    """It raises an error of this package whose text matches the pattern.

    As DCP's ``CheckpointException``, it counts by what every rank in it raised; where DCP quotes an
    error of reading the metadata in one of its own, by the text alone.
    """

    match: str
    error: type[Exception] = FlatOptimError


@dataclass(frozen=True)
class Gives:
    """It returns this; tensors are compared to the bit."""

    value: Any = None


@dataclass(frozen=True)
class Attack:
    """One case.

    Attributes:
        name: what is done.
        attack: does it, in an empty place.
        must: what has to come of it.
        on: the kinds of stores that it is run on.
        seconds: what it may take, on a busy machine.
    """

    name: str
    attack: Callable[[Place], Any]
    must: Refused | Gives
    on: tuple[str, ...] = EVERYWHERE
    seconds: float = 20.0
