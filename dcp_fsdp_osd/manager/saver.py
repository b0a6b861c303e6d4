"""What goes on beside training: writing, copying up, and removing what is not kept."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from functools import partial
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.stateful import Stateful

from dcp_fsdp_osd.manager.copying import copy_up
from dcp_fsdp_osd.manager.group import Group, forget_frames
from dcp_fsdp_osd.manager.restore import first_line
from dcp_fsdp_osd.manager.steps import Retention, Steps
from dcp_fsdp_osd.save.planner import FlatOptimSavePlanner
from dcp_fsdp_osd.staging import FlatStager
from dcp_fsdp_osd.storage.transfer import Deadline
from dcp_fsdp_osd.storage.writer import StreamingWriter

__all__ = ["Saver"]

logger = logging.getLogger(__name__)


class Saver:
    """One rank's saves, one after the other, and what follows each.

    Call order on every rank, the same one: :meth:`finish` and :meth:`stage`, then :meth:`begin`
    once all ranks are known to have done so.

    Args:
        near: where saves go.
        far: where they are copied to, or None.
        retention, near_retention: of `far`, or of `near` where there is no `far`; of `near` else.
        group: for saves alone; left for good when this rank fails in the middle of one.
        copying_group: likewise, for copies.
    """

    def __init__(
        self,
        near: Steps,
        far: Steps | None,
        *,
        retention: Retention,
        near_retention: Retention,
        group: Group,
        copying_group: Group | None,
    ) -> None:
        self._near, self._far = near, far
        self._retention, self._near_retention = retention, near_retention
        self._group, self._copying_group = group, copying_group
        self._planner = FlatOptimSavePlanner()
        self._stager = FlatStager()
        self._writing = ThreadPoolExecutor(1, thread_name_prefix="dcp_fsdp_osd_save")
        self._after = ThreadPoolExecutor(1, thread_name_prefix="dcp_fsdp_osd_after_save")
        self._saving: Future[str] | None = None
        self._following: list[Future[None]] = []  # what follows saves, oldest first

    def stage(self, state: Mapping[str, Any], *, copied: bool) -> dict[str, Any]:
        """The state dicts of `state`'s Statefuls, all of it copied if so asked."""
        if copied:
            return self._stager.stage(state)
        return {
            key: value.state_dict() if isinstance(value, Stateful) else value
            for key, value in state.items()
        }

    def finish(self, due: Deadline) -> None:
        """Wait for the save under way, and for what followed all but it; raise their errors.

        Raises:
            StorageError: the deadline is over first.
        """
        if self._saving is not None:
            wait_for([self._saving], due.left())
            if not self._saving.done():
                due.check(f"{self._near.shown}: the save before is still under way")
            saving, self._saving = self._saving, None
            _raise(saving)
        # Copying up that is slower than saving holds training up in the end.
        while len(self._following) > 1:
            wait_for(self._following[:1], due.left())
            if not self._following[0].done():
                due.check(f"{self._near.shown}: the save before last is still being copied up")
            _raise(self._following.pop(0))

    @property
    def idle(self) -> bool:
        """Whether all that followed saves is over."""
        return all(each.done() for each in self._following)

    def finish_all(self) -> None:
        """Wait for everything; raise the first error."""
        errors = []
        for future in (self._saving, *self._following):
            if future is not None and (error := future.exception()) is not None:
                errors.append(error)
        self._saving, self._following = None, []
        if errors:
            raise errors[0]

    def begin(
        self, step: int, staged: dict[str, Any], due: Deadline, *, blocking: bool
    ) -> Future[str]:
        """Write what was staged; the path or URL, when it is committed."""
        write = partial(self._write, step, staged, due)
        saving: Future[str] = Future()
        if blocking:
            saving.set_result(write())
        else:
            saving = self._saving = self._writing.submit(write)
        self._following.append(self._after.submit(self._follow, saving, step))
        return saving

    def close(self) -> None:
        """Nothing may be under way."""
        self._writing.shutdown()
        self._after.shutdown()
        self._stager.close()
        self._group.leave()
        if self._copying_group is not None:
            self._copying_group.leave()

    def _write(self, step: int, state: dict[str, Any], due: Deadline) -> str:
        place, left = self._near.at(step), due.left()
        if left is not None:  # that it is over is told to all ranks by the save itself
            left = max(left, 0.001)
        options = {**self._near.writer_options, "overwrite": True, "deadline": left}
        try:
            save(
                state,
                storage_writer=StreamingWriter(place, **options),
                planner=self._planner,
                process_group=self._group.opened(),
            )
        except BaseException as error:
            logger.error("%s: step %d: not saved: %s", self._near.shown, step, first_line(error))
            forget_frames(error)
            self._planner = FlatOptimSavePlanner()  # nothing of a failed save is used again
            if not isinstance(error, CheckpointException):
                # This rank left in the middle: the others must not wait for it.
                self._group.leave()
            else:
                self._remove_debris(self._near, step, self._group)
            raise
        self._near.damaged.discard(step)
        return place

    def _follow(self, saving: Future[str], step: int) -> None:
        if saving.exception() is not None:
            return
        if self._far is None:
            self._clean(self._near, self._retention, step)
            return
        assert self._copying_group is not None
        try:
            copy_up(self._near, self._far, step, self._retention, self._copying_group)
        except BaseException as error:
            logger.error("%s: step %d: not copied: %s", self._far.shown, step, first_line(error))
            self._remove_debris(self._far, step, self._copying_group)
            raise
        self._clean(self._far, self._retention, step)
        self._clean(self._near, self._near_retention, step)

    def _remove_debris(self, place: Steps, step: int, group: Group) -> None:
        """After a failure of which all ranks know: nobody writes any more."""
        if group.rank == 0 and (group.alone or group.pg is not None):
            remove = partial(place.remove_debris, step)
            _quietly(f"{place.shown}: remove what a failed save left", remove)

    def _clean(self, place: Steps, retention: Retention, step: int) -> None:
        """Remove what is not to be kept any more."""
        if self._group.rank == 0:
            clean = partial(place.clean, retention, step)
            _quietly(f"{place.shown}: remove what is not to be kept", clean)


def _quietly(what: str, call: Callable[[], None]) -> None:
    try:
        call()
    except Exception as error:
        logger.warning("%s: failed, is tried again after the next save: %s", what, error)


def _raise(future: Future[Any]) -> None:
    error = future.exception()
    if error is not None:
        raise error
