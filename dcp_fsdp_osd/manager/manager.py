"""CheckpointManager: saves beside training, keeps some checkpoints, resumes from the newest."""

from __future__ import annotations

import logging
import operator
import os
import signal
import warnings
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import Any

import torch.distributed as dist

from dcp_fsdp_osd.errors import StorageError
from dcp_fsdp_osd.manager.group import Group
from dcp_fsdp_osd.manager.preemption import Preemption
from dcp_fsdp_osd.manager.restore import ERRORS, first_line, load_first_good
from dcp_fsdp_osd.manager.saver import Saver
from dcp_fsdp_osd.manager.steps import Retention, Steps
from dcp_fsdp_osd.misuse.arguments import check_bool, check_path, check_positive
from dcp_fsdp_osd.storage.store import Backend
from dcp_fsdp_osd.storage.transfer import Deadline, RetryPolicy

__all__ = ["CheckpointManager"]

logger = logging.getLogger(__name__)


class CheckpointManager:
    """The checkpoints of one training run, in folders ``step-<n>`` below a path or URL.

    ::

        with CheckpointManager("s3://bucket/run", save_every=500) as manager:
            state = {"model": FlatModelState(model), "optim": FlatOptimState(model, optim)}
            first = manager.restore(state) or 0
            for step in range(first + 1, steps + 1):
                train(step)
                if manager.should_save(step):
                    manager.save(step, state)
                if manager.preempted:
                    break

    Each folder is a checkpoint as ``dcp.save`` leaves it, which stock ``dcp.load`` reads too.

    Every rank makes a manager and calls :meth:`restore`, :meth:`save`, :meth:`should_save` and
    :meth:`close` in the same order with the same arguments; an error of one rank is raised on all.
    The constructor is collective: it makes gloo groups of its own over the ranks of
    `process_group` (one for these calls, one for the saves that run beside them), which
    :meth:`close` destroys.  Without ``torch.distributed`` it works on this process alone.  No other
    job may save below the same path at the same time.

    Args:
        url: a local path or any URL that ``StreamingWriter`` takes.  A local folder is made by the
            first save.
        keep_last: how many of the newest checkpoints are kept; None for all.  Others are deleted
            with all files in their folders.
        keep_every: those of steps that it divides are kept as well.
        save_every: steps that it divides are to be saved, says :meth:`should_save`.
        async_save: :meth:`save` returns as soon as it has copied the state, and the copy (this
            rank's part of the state in host memory, which is kept from save to save) is written by
            a thread.
        local: a folder on fast storage that all ranks see.  Saves go there, and are copied up to
            `url` beside training, by all ranks together; a save that comes when two others are yet
            to be copied waits for the first of them.  :meth:`restore` takes the newest of both
            places, the local one where both have it.  (:meth:`close` waits until all is copied.)
        local_keep: how many are kept at `local` once they are copied.
        process_group: the ranks that save and load together; by default all of the job.  With a
            part of them, each must be in as many process groups as the others.
        preempt_signals: say that the job will be ended soon, see :attr:`preempted`.  ``()`` leaves
            all signals alone, and :meth:`should_save` without a collective.
        backend: as for ``StreamingWriter``, as are the next three.
        storage_options: of the storage client.
        stall_seconds: time limit of storage that does nothing.
        retry: how transient errors are retried.
        writer_options: further ones of ``StreamingWriter``.
        reader_options: further ones of ``StreamingReader``.

    Raises:
        ValueError: an argument; or signals are to be handled, and this is not the main thread.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        keep_last: int | None = 3,
        keep_every: int | None = None,
        save_every: int | None = None,
        async_save: bool = True,
        local: str | os.PathLike[str] | None = None,
        local_keep: int | None = 1,
        process_group: dist.ProcessGroup | None = None,
        preempt_signals: Iterable[int] = (signal.SIGTERM,),
        backend: Backend = "auto",
        storage_options: Mapping[str, Any] | None = None,
        stall_seconds: float = 60.0,
        retry: RetryPolicy | None = None,
        writer_options: Mapping[str, Any] | None = None,
        reader_options: Mapping[str, Any] | None = None,
    ) -> None:
        check_path(url)
        check_bool("async_save", async_save)
        for name, number in (
            ("keep_last", keep_last),
            ("keep_every", keep_every),
            ("save_every", save_every),
            ("local_keep", local_keep),
        ):
            if number is not None and _whole(number, name) < 1:
                raise ValueError(f"expected {name} to be 1 at least, or None, found {number!r}")
        self._save_every = save_every
        self._async = async_save
        self._keeps = f"keep_last={keep_last}, keep_every={keep_every}"
        session = {"stall_seconds": stall_seconds, "retry": retry}
        remote = {"backend": backend, "storage_options": storage_options}
        self._steps = Steps(url, {**session, **remote}, writer_options, reader_options)
        self._near = self._steps
        if local is not None:
            check_path(local)
            self._near = Steps(local, session, writer_options, reader_options)
            if not self._near.is_local or self._near.url == self._steps.url:
                raise ValueError(f"expected local to be a path, other than url, found {local!r}")
        self._preemption = Preemption(preempt_signals)
        self._preemption.check()
        self._group = Group(process_group)
        self._last: int | None = None  # step that was saved last
        self._preempted = self._saved_since = self._closed = False
        names = ", ".join(each.name for each in self._preemption.signals)
        try:
            self._group.check_same("CheckpointManager", f"{self!r}, preempt_signals=({names})")
        except BaseException:
            self._group.leave()
            raise
        self._saver = Saver(
            self._near,
            None if local is None else self._steps,
            retention=Retention(keep_last, keep_every),
            near_retention=Retention(local_keep),
            group=Group(process_group),
            copying_group=None if local is None else Group(process_group),
        )
        self._preemption.install()

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self._steps.shown!r}, {self._keeps}, "
            f"save_every={self._save_every}, async_save={self._async}, ranks={self._group.size}"
            f"{'' if self._near is self._steps else f', local={self._near.shown!r}'}"
            f"{', closed' if self._closed else ''})"
        )

    # ------------------------------------------------------------ loading

    def steps(self) -> list[int]:
        """The steps of which there is a checkpoint, ascending, as this rank sees them now.

        Not collective: ranks that ask at different moments may get different answers.
        """
        return sorted({*self._steps.committed(), *self._near.committed()})

    def restore(self, state: dict[str, Any], *, step: int | None = None) -> int | None:
        """Load the newest checkpoint into `state`; the step that it is of.  Collective.

        Newest is the one of the greatest step.  If bytes of it are missing or altered, on any rank,
        all ranks warn and take the one before; a damaged one is deleted when a good one after it
        has been saved.  Nothing else makes it go back: what does not fit the model, or storage that
        fails, is raised.

        Args:
            state: what ``dcp.load`` takes, with ``FlatModelState`` and ``FlatOptimState``, loaded
                in place.  Values that are no Stateful are replaced in the dict.
            step: of the checkpoint to load; then there is no going back.  Newer ones stay, and the
                next ``restore()`` would take them.

        Returns:
            The step, or None if there is no checkpoint: then `state` is as it was.

        Raises:
            CorruptCheckpointError: each checkpoint is damaged.  `state` may hold parts of several
                and must not be used.
            CheckpointException: what ``dcp.load`` raised on every rank.
            StorageError: there is no checkpoint of `step`, or the storage failed.
        """
        self._check_open()
        problem = None
        try:
            _check_state(state)
            wanted = -1 if step is None else _step(step)
            self._finish(Deadline(None))
        except ERRORS as error:
            problem, wanted = error, -1
        self._group.agree("restore", wanted, problem, False)
        found = self._group.from_first("list the checkpoints", self._candidates)
        have = sorted({number for number, _ in found})
        places = (self._near, self._steps)
        candidates = [(n, places[tier]) for n, tier in found if step is None or n == wanted]
        if not candidates:
            if step is None:
                return None
            last = ", ".join(map(str, have[-10:])) or "none"
            raise StorageError(
                f"{self._steps.shown}: no checkpoint of step {wanted}; the last ones are: {last}"
            )
        loaded = load_first_good(state, candidates, self._group, go_back=step is None)
        if step is not None and have[-1] > step:
            newer = ", ".join(str(number) for number in have[-10:] if number > step)
            warnings.warn(
                f"{self._steps.shown}: restored step {step}, after which there are others "
                f"({newer}): the next restore() takes the newest. Delete them, or save elsewhere, "
                "if this run is to replace them",
                stacklevel=2,
            )
        return loaded

    def _candidates(self) -> list[tuple[int, int]]:
        """Steps, newest first, and 0 for the near or 1 for the far place of each."""
        found = [(step, 1) for step in self._steps.committed()]
        if self._near is not self._steps:
            found += [(step, 0) for step in self._near.committed()]
        return sorted(found, key=lambda each: (-each[0], each[1]))

    # ------------------------------------------------------------ saving

    def should_save(self, step: int) -> bool:
        """Whether `step`, which has just ended, is to be saved: `save_every` divides it, or the job
        is being preempted and nothing has been saved since.

        Collective, where there are several ranks and `preempt_signals`: an all-reduce of four
        numbers over gloo, which takes until the slowest rank has come, and then some milliseconds
        that grow with the number of ranks (gloo passes them around a ring).  It waits for no
        accelerator.  Where that is too much for steps that are short, call it every few steps, on
        all ranks alike; there is no such cost once all know that they are preempted.

        Raises:
            ValueError: ranks ask about different steps.
        """
        self._check_open()
        step = _step(step)
        if self._preemption.signals and not self._preempted:
            noticed = self._preemption.noticed
            self._preempted = self._group.agree(f"should_save({step})", step, None, noticed)
            if self._preempted:
                logger.warning("%s: preempted, as agreed at step %d", self._steps.shown, step)
        due = self._save_every is not None and step % self._save_every == 0
        return step != self._last and (due or (self._preempted and not self._saved_since))

    @property
    def preempted(self) -> bool:
        """Whether one of the `preempt_signals` had come to any rank by the last
        :meth:`should_save`; the same on all ranks."""
        return self._preempted

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        wait: bool = False,
        deadline: float | None = None,
    ) -> Future[str]:
        """Save `state` as the checkpoint of `step`; one that exists is replaced.  Collective.

        Waits for the save before and raises its error, if it had one; then `state` has not been
        saved, and this can be called again.  As all ranks raise, training may also go on without:
        ``except (CheckpointException, StorageError)``.  The state may change as soon as this
        returns.

        Args:
            wait: for the commit, as with ``async_save=False``: nothing is copied, and an error is
                raised here.
            deadline: seconds from now within which the checkpoint is committed, or the save fails
                and leaves nothing.  Counts the wait for the save before; with `local` it is about
                the commit there.

        Returns:
            What is done when the checkpoint is committed, with its path or URL; or has the error,
            which :meth:`save`, :meth:`wait` and :meth:`close` raise once.

        Raises:
            CheckpointException: a save failed on some rank; nothing of it is left.
            StorageError: so did what comes before it, on another rank.
        """
        self._check_open()
        due = Deadline(deadline)
        blocking = wait or not self._async
        problem = None
        number, staged = -1, {}
        try:
            number = _step(step)
            check_positive(deadline=deadline)
            _check_state(state)
            self._finish(due)
            if number == self._last and self._near is not self._steps:
                self._finish_all()  # what is replaced may be on its way up
            staged = self._saver.stage(state, copied=not blocking)
        except ERRORS as error:
            problem = error
        busy = self._group.agree(f"save({step})", number, problem, not self._saver.idle)
        if not busy:  # on any rank: then all know of the same errors
            self._finish_all()
        saving = self._saver.begin(number, staged, due, blocking=blocking)
        self._last, self._saved_since = number, self._preempted
        return saving

    def _finish(self, due: Deadline) -> None:
        try:
            self._saver.finish(due)
        except ERRORS:
            self._last, self._saved_since = None, False
            raise

    def _finish_all(self) -> None:
        try:
            self._saver.finish_all()
        except ERRORS:
            self._last, self._saved_since = None, False
            raise

    # ------------------------------------------------------------ the end

    def wait(self) -> None:
        """Wait until nothing is under way any more; raise the error of a save or copy, if any.

        Not collective.
        """
        self._finish_all()

    def close(self) -> None:
        """:meth:`wait`, then let go of threads, memory, process groups and signals.

        May be called again.  Needed on every rank, but not collective.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._finish_all()
        finally:
            self._saver.close()
            self._preemption.restore()
            self._group.leave()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except ERRORS as failure:
            if error is None:
                raise
            logger.error("%s: closed with: %s", self._steps.shown, first_line(failure))

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("expected an open CheckpointManager, found that it was closed")


def _check_state(state: Any) -> None:
    if not isinstance(state, Mapping):
        raise TypeError(
            "expected a dict as dcp.save takes it, {'model': FlatModelState(model), ...}, found "
            f"{type(state).__name__}"
        )


def _whole(number: Any, name: str) -> int:
    try:
        if not isinstance(number, bool):
            return operator.index(number)
    except TypeError:
        pass
    raise TypeError(f"expected {name} to be a whole number, found {number!r}")


def _step(step: Any) -> int:
    number = _whole(step, "step")
    if number < 0:
        raise ValueError(f"expected step to be 0 at least, found {step!r}")
    return number
