"""Loading the newest checkpoint that is whole, the same on all ranks."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from dcp_fsdp_osd.errors import (
    CheckpointMismatchError,
    CorruptCheckpointError,
    LayoutError,
    StorageError,
    UnsafeCheckpointError,
    listed,
    message_of,
)
from dcp_fsdp_osd.load.planner import FlatOptimLoadPlanner
from dcp_fsdp_osd.manager.group import Group, forget_frames
from dcp_fsdp_osd.manager.steps import Steps
from dcp_fsdp_osd.storage.reader import StreamingReader

__all__ = ["ERRORS", "first_line", "load_first_good"]

ERRORS = (Exception, CheckpointException)
"""What DCP and we raise: a CheckpointException is no Exception."""
logger = logging.getLogger(__name__)
_NO_DAMAGE = (CheckpointMismatchError, LayoutError, UnsafeCheckpointError)


class _Verdict(IntEnum):
    """The greatest of all ranks' is that of all."""

    GOOD = 0
    DAMAGED = 1
    FAILED = 2


def _judge(error: BaseException | None) -> _Verdict:
    """What one rank's load says.

    Damaged is a checkpoint of which a rank found bytes missing or altered; what other ranks say
    then, who waited for that one, does not count, unless the checkpoint does not fit.
    """
    if error is None:
        return _Verdict.GOOD
    found = list(_errors(error))
    if any(isinstance(each, _NO_DAMAGE) for each in found):
        return _Verdict.FAILED
    if any(isinstance(each, CorruptCheckpointError) for each in found):
        return _Verdict.DAMAGED
    return _Verdict.FAILED


def _errors(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, CheckpointException):
        for each, _ in error.failures.values():
            yield each
    else:
        yield error


def load_first_good(
    state: dict[str, Any],
    candidates: Sequence[tuple[int, Steps]],
    group: Group,
    *,
    go_back: bool,
) -> int:
    """Load the first of `candidates` that is not damaged; its step.  Collective.

    Damaged ones are noted in their `Steps`.  Without `go_back` only other copies of the same step
    are tried.

    Raises:
        CorruptCheckpointError: all are damaged.
        CheckpointException: what ``dcp.load`` raised, for another reason or without `go_back`.
        StorageError: loading failed on other ranks alone.
    """
    failure: BaseException | None = None
    told: list[str] = []
    for number, (step, place) in enumerate(candidates, 1):
        failure = _load(state, place, step, group)
        verdict = _Verdict(group.maximum(_judge(failure))[0])
        if verdict is _Verdict.GOOD:
            if group.rank == 0:
                _tidy(place, step)
            return step
        last = number == len(candidates)
        if verdict is _Verdict.DAMAGED:
            place.damaged.add(step)
        if verdict is _Verdict.FAILED or (last and not go_back):
            raise failure or StorageError(
                f"{place.shown}: step {step} failed to load on another rank; the state may be "
                "loaded in part: do not use it"
            )
        reason = "as another rank found" if failure is None else first_line(failure)
        told.append(f"step {step} of {place.shown}: {reason}")
        if not last:
            then, where = candidates[number]
            what = "another copy of it" if then == step else f"step {then}"
            warnings.warn(
                f"{place.shown}: the checkpoint of step {step} is damaged; {what} is taken from "
                f"{where.shown}. {reason}",
                stacklevel=3,
            )
    raise CorruptCheckpointError(
        f"{candidates[0][1].shown}: each of the {len(told)} checkpoints is damaged. The state may "
        f"hold parts of several: do not use it.\n  {listed(told)}"
    ) from failure


def _tidy(place: Steps, step: int) -> None:
    try:
        place.tidy(step)
    except Exception as error:
        logger.warning("%s: step %d: could not be tidied up: %s", place.shown, step, error)


def _load(state: dict[str, Any], place: Steps, step: int, group: Group) -> BaseException | None:
    """Its error, if there was one."""
    try:
        load(
            state,
            storage_reader=StreamingReader(
                place.at(step), process_group=group.opened(), **place.reader_options
            ),
            planner=FlatOptimLoadPlanner(),
            process_group=group.opened(),
        )
    except ERRORS as error:
        forget_frames(error)
        return error
    return None


def first_line(error: BaseException) -> str:
    """What it says, or the first of the errors that DCP gathered in it."""
    failures: Mapping[int, Any] = getattr(error, "failures", {})
    for rank, (first, _) in failures.items():
        return f"rank {rank}: {type(first).__name__}: {message_of(first)}"
    return f"{type(error).__name__}: {message_of(error)}"
