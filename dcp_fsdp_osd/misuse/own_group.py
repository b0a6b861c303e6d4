"""``dcp.async_save`` on a thread over the group that training uses: the two mix their messages.

DCP's collectives then meet training's in another order on each rank: both hang, or take one for the
other, in stock too. What is known of the call is known to DCP alone; it is asked on the caller's
thread, before anything is sent, by what DCP calls there.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch.distributed as dist

__all__ = ["check_own_group", "saves_by_process"]

_ASKED = ("async_save", "torch.distributed.checkpoint.state_dict_saver")


def check_own_group() -> None:
    """To be called where ``dcp.async_save`` makes or copies the state dict, on every rank.

    Only a job whose one backend is gloo is refused: with ``"cpu:gloo,cuda:nccl"`` training has nccl
    to itself, and a process has a group of its own.

    Raises:
        ValueError: the caller is ``dcp.async_save`` on a thread, over the default group.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    call = _arguments(sys._getframe(1))
    if call is None or _kind(call) != "thread":
        return
    group = call.get("process_group")
    backends = {each.rpartition(":")[2] for each in dist.get_backend_config().split(",")}
    if (group is None or group is dist.group.WORLD) and backends == {"gloo"}:
        raise ValueError(
            "expected dcp.async_save(process_group=...) to be a group that nothing else uses, "
            "found the one that training may use meanwhile, over gloo: their messages would mix, "
            "and both hang. Pass process_group=dist.new_group(backend='gloo'), made once"
        )


def saves_by_process() -> tuple[dist.ProcessGroup | None] | None:
    """The group given to the ``dcp.async_save`` that is calling, if it saves by process."""
    call = _arguments(sys._getframe(1))
    return (call.get("process_group"),) if call is not None and _kind(call) == "process" else None


def _kind(call: dict[str, Any]) -> str:
    return str(getattr(call.get("async_checkpointer_type"), "value", "thread"))


def _arguments(frame: FrameType | None) -> dict[str, Any] | None:
    """Those of the ``dcp.async_save`` that is being called, if any."""
    while frame is not None:
        if (frame.f_code.co_name, frame.f_globals.get("__name__")) == _ASKED:
            return dict(frame.f_locals)
        frame = frame.f_back
    return None
