"""Plans that are small on their way between ranks, and quick to take in.

DCP pickles every rank's plan, gathers them on one rank, and sends each rank its part of the global
plan. Names and shapes repeat, so that compressed they are a tenth. The coordinator unpickles
thousands of plans one after the other: Python's cycle collector then walks all that are there
already, again and again, and takes longer than the unpickling.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import pickle
import zlib
from collections.abc import Iterator
from typing import Any, TypeVar, cast

from torch.distributed.checkpoint.planner import LoadPlan, SavePlan

__all__ = ["compact", "no_collections", "packed", "unpacked"]

P = TypeVar("P", SavePlan, LoadPlan)


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Without the cycle collector, which would walk millions of new objects again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def packed(value: Any) -> bytes:
    """``value`` pickled and compressed; :func:`unpacked` gives it back."""
    # Level 1: more effort makes it a tenth smaller and takes twice as long.
    return zlib.compress(pickle.dumps(value, protocol=5), 1)


def unpacked(data: bytes) -> Any:
    """What :func:`packed` was given. It runs what a pickle says: of other ranks' bytes alone."""
    return pickle.loads(zlib.decompress(data))


class _Compact:
    """Mixed into a plan: it is the plan that it was, and is pickled compressed."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), packed(_fields(self)))


class _SavePlan(_Compact, SavePlan):
    pass


class _LoadPlan(_Compact, LoadPlan):
    pass


def compact(plan: P) -> P:
    """``plan``, which differs in how it is pickled alone; so do copies by ``dataclasses.replace``.

    Values in ``storage_data``, ``planner_data`` and ``items`` have to be picklable, as ever.
    """
    kind: Any = _SavePlan if isinstance(plan, SavePlan) else _LoadPlan
    return cast(P, kind(**_fields(plan)))


def _fields(plan: Any) -> dict[str, Any]:
    return {each.name: getattr(plan, each.name) for each in dataclasses.fields(plan)}


def _restored(kind: type[Any], data: bytes) -> Any:
    with no_collections():
        return kind(**unpacked(data))
