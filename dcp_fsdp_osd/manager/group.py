"""The ranks of a manager, over a process group that nothing else uses.

Collectives of one group must be called in the same order on every rank, so what runs on another
thread has a group of its own.
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from dcp_fsdp_osd.errors import StorageError, listed, message_of

__all__ = ["Group", "forget_frames"]

T = TypeVar("T")
_CHARACTERS = 2000  # of an error that other ranks are told


class Group:
    """A gloo group over the ranks of another one; or this process alone, without torch.distributed.

    Making one is collective over those ranks.

    Args:
        parent: None for all ranks of the job.

    Raises:
        ValueError: this rank is not in `parent`.
    """

    def __init__(self, parent: dist.ProcessGroup | None) -> None:
        self.alone = not (dist.is_available() and dist.is_initialized())
        self.pg: dist.ProcessGroup | None = None
        self.rank, self.size, self._of_all = 0, 1, True
        if self.alone:
            if parent is not None:
                raise ValueError("expected process_group=None where no process group is there")
            return
        if parent is not None and dist.get_rank(parent) < 0:
            raise ValueError("expected process_group to be one that this rank is in")
        ranks = None if parent is None else dist.get_process_group_ranks(parent)
        self._of_all = ranks is None or len(ranks) == dist.get_world_size()
        if self._of_all:
            self.pg = dist.new_group(backend="gloo")
        else:
            # The other ranks of the job know nothing of this.
            self.pg = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        self.rank, self.size = dist.get_rank(self.pg), dist.get_world_size(self.pg)

    def maximum(self, *numbers: int) -> list[int]:
        """The largest over all ranks of each.  Collective."""
        if self.alone:
            return list(numbers)
        tensor = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        self._talk(lambda pg: dist.all_reduce(tensor, dist.ReduceOp.MAX, group=pg))
        return [int(number) for number in tensor.tolist()]

    def agree(self, what: str, number: int, problem: BaseException | None, flag: bool) -> bool:
        """Whether `flag` is set on any rank, where none has a `problem`.  Collective.

        Raises:
            BaseException: `problem`, on the ranks that have one.
            StorageError: on the others, with what those said.
            ValueError: the numbers, of the step that `what` is about, are not the same.
        """
        failed, high, low, flagged = self.maximum(problem is not None, number, -number, flag)
        if failed and not self.alone:
            told: list[str | None] = [None] * self.size
            own = problem and f"{type(problem).__name__}: {message_of(problem)[:_CHARACTERS]}"
            self._talk(lambda pg: dist.all_gather_object(told, own, group=pg))
        if problem is not None:
            raise problem
        if failed:
            lines = [f"rank {rank}: {text}" for rank, text in enumerate(told) if text]
            raise StorageError(f"{what}: not on all ranks:\n  {listed(lines)}")
        if high != -low:
            raise ValueError(
                f"{what}: expected the same step on every rank, found {-low} to {high}"
            )
        return bool(flagged)

    def check_same(self, what: str, text: str) -> None:
        """Raise ValueError on every rank where `text` is not the same on all.  Collective."""
        told = [text] * self.size
        if not self.alone:
            self._talk(lambda pg: dist.all_gather_object(told, text, group=pg))
        lines = [f"rank {rank}: {each}" for rank, each in enumerate(told) if each != told[0]]
        if lines:
            raise ValueError(
                f"expected every rank to make the same {what}, found on rank 0: {told[0]}\n  and "
                f"{listed(lines)}"
            )

    def from_first(self, what: str, make: Callable[[], T]) -> T:
        """What `make` returns on the first rank; its error is everyone's.  Collective."""
        told: list[Any] = [None]
        problem = None
        if self.rank == 0:
            try:
                told = [make()]
            except Exception as error:
                problem = error
        self.agree(what, 0, problem, False)
        if not self.alone:
            self._talk(
                lambda pg: dist.broadcast_object_list(told, dist.get_global_rank(pg, 0), group=pg)
            )
        return told[0]  # type: ignore[no-any-return]

    def _talk(self, call: Callable[[dist.ProcessGroup], object]) -> None:
        """Whoever fails in `call` leaves, so that nobody waits for it."""
        pg = self.opened()
        assert pg is not None
        try:
            call(pg)
        except (RuntimeError, ValueError) as error:
            del pg
            forget_frames(error)
            self.leave()
            raise StorageError(
                f"the ranks of the checkpoint manager have lost each other: {message_of(error)}"
            ) from error

    def leave(self) -> None:
        """Let go of the group: operations of others that wait for this rank fail.

        That they do when nothing refers to the group any more.  Not collective.  (A group of a
        part of the job stays until the job's own is destroyed: the next one of these ranks would
        have its name, and meet its dead addresses.)
        """
        pg, self.pg = self.pg, None
        if pg is None or not self._of_all:
            return
        # Before torch 2.7 its destructor may wait for threads of gloo that have yet to let go of
        # the last tensors, and hold what they wait for.
        time.sleep(0.05)
        try:
            if dist.is_initialized():
                dist.destroy_process_group(pg)
        except ValueError:  # gone with the job's own
            pass
        del pg
        gc.collect()

    def opened(self) -> dist.ProcessGroup | None:
        """For DCP: None for this process alone.  Raises if the group is gone."""
        if self.pg is None and not self.alone:
            raise StorageError(
                "the manager's process group is gone: it was closed, the job's process group was "
                "destroyed, or a save failed in the middle of its communication"
            )
        return self.pg


def forget_frames(error: BaseException) -> None:
    """Let go of the variables of the calls that `error` came through, which may be a group."""
    traceback.clear_frames(error.__traceback__)
