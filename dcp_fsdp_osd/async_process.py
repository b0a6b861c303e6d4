"""The background processes of ``AsyncCheckpointerType.PROCESS``, after one of them has died.

Each rank has one, which torch starts at the first save; together they have a process group.  Torch
keeps one that died (killed for memory, as a rule) for good: each later save fails, on its rank at
once, and on another when its process has waited for a message of the dead one, half an hour if the
order of messages will have it so.  The others' are of no use any more either: they lost a peer.
"""

from __future__ import annotations

import logging
import time
from multiprocessing import connection, resource_sharer

import torch
import torch.distributed as dist

from dcp_fsdp_osd.compat import background_process, forget_background_process

__all__ = ["recover_async_process"]

logger = logging.getLogger(__name__)

_NONE, _ALIVE, _DEAD = range(3)
_ROUNDS, _PAUSE = 50, 0.1  # for a process that another rank knows already to have started
_END_SECONDS = 10.0


def recover_async_process(process_group: dist.ProcessGroup | None = None) -> bool:
    """Let ``dcp.async_save`` by process go on after a background process has died.

    Where any rank's has, all ranks' are ended, what they were writing is given up (its future
    raises), and the next save starts new ones.  Where none has, this is one small ``all_reduce``,
    and nothing changes.  :class:`~dcp_fsdp_osd.FlatStager` calls it in each save by process; with
    another stager call it before a save, or after one that failed.

    What this process has sent at that moment to yet other processes, through a ``multiprocessing``
    queue or pipe, is lost if it is in shared memory and they have not received it: nothing tells
    its handles from those that the dead process left behind.

    Collective over `process_group`, which must be that of the saves.  Before torch 2.7, which has
    no such processes, it does nothing.

    Returns:
        Whether a process had died.
    """
    for left in reversed(range(_ROUNDS)):
        worst, least = _extremes(_state(), process_group)
        if worst in (_DEAD, least) or not left:
            break
        time.sleep(_PAUSE)  # one that has just started, of which its rank has yet to hear
    if worst == least != _DEAD:
        return False
    process = background_process()
    if process is not None:
        died = _state() == _DEAD
        process.kill()
        process.join(_END_SECONDS)
        forget_background_process()
        # Of what it was sent and never fetched, handles of shared memory wait for it here for ever.
        resource_sharer.stop(timeout=_END_SECONDS)
        if died:
            logger.warning(
                "the background process of dcp.async_save has died (exit code %s; a negative one "
                "is the signal that killed it, -9 often for want of memory): a new one is started",
                process.exitcode,
            )
    # Nobody starts a new one while an old one may still write.
    _extremes(_NONE, process_group)
    return True


def _state() -> int:
    process = background_process()
    if process is None:
        return _NONE
    # The process is asked by threads of torch's at the same time, which is_alive() does not bear.
    return _DEAD if connection.wait([process.sentinel], 0) else _ALIVE


def _extremes(state: int, group: dist.ProcessGroup | None) -> tuple[int, int]:
    """The largest and the smallest of all ranks' states."""
    if not dist.is_available() or not dist.is_initialized():
        return state, state
    on_cpu = "cpu:" in dist.get_backend_config(group)
    device = torch.device("cpu") if on_cpu else torch.accelerator.current_accelerator()
    states = torch.tensor([state, -state], device=device)
    dist.all_reduce(states, dist.ReduceOp.MAX, group=group)
    worst, least = states.tolist()
    return worst, -least
