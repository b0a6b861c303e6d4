"""One rank of a process group does something for all of it; its error is everyone's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from dcp_fsdp_osd.errors import StorageError, message_of

__all__ = ["from_first_rank"]

T = TypeVar("T")


def from_first_rank(group: dist.ProcessGroup | None, what: str, make: Callable[[], T]) -> T:
    """What ``make`` returns on the first rank of ``group``, on all of them.  Collective.

    Without a group, or in one of one rank, every caller makes it for itself.

    Raises:
        StorageError: ``make`` raised on the first rank (which raises that error itself); its
            cause is a FileNotFoundError where that one's is.
    """
    if group is None or dist.get_world_size(group) == 1:
        return make()
    told: list[Any] = [None]
    failure: Exception | None = None
    if dist.get_rank(group) == 0:
        try:
            told = [(None, make())]
        except Exception as error:
            # As text: not every client's error can be pickled.
            missing = isinstance(error.__cause__, FileNotFoundError)
            told = [((type(error).__name__, message_of(error), missing), None)]
            failure = error
    dist.broadcast_object_list(told, src=dist.get_global_rank(group, 0), group=group)
    if failure is not None:
        raise failure
    problem, value = told[0]
    if problem is None:
        return value  # type: ignore[no-any-return]
    kind, text, missing = problem
    raise StorageError(f"rank 0 of the process group could not {what}: {kind}: {text}") from (
        FileNotFoundError(text) if missing else None
    )
