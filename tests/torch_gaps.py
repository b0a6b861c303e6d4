"""What the installed torch lacks of what tests use; nothing else in tests asks for its version.

A test of what it does not have is skipped by one of the marks here, which say so.  What tests need
of torch beside what they test (:func:`forget_placements`, :func:`complete_cpu_streams`,
:func:`async_save`) is made up for.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

__all__ = [
    "async_kinds",
    "async_save",
    "comparable",
    "complete_cpu_streams",
    "forget_placements",
    "lacks",
    "needs_save_without_collectives",
]


def lacks(missing: bool, what: str) -> pytest.MarkDecorator:
    """Skips a test where ``missing``; says that this torch has no ``what``."""
    return pytest.mark.skipif(missing, reason=f"torch {torch.__version__} has no {what}")


_parameters = inspect.signature(dcp.save).parameters
needs_save_without_collectives = lacks(  # 2.9
    "use_collectives" not in _parameters, "dcp.save(use_collectives=False)"
)

_HAS_KINDS = hasattr(dcp.state_dict_saver, "AsyncCheckpointerType")  # 2.7
async_kinds = pytest.mark.parametrize(
    "kind",
    [
        "thread",
        pytest.param("process", marks=lacks(not _HAS_KINDS, "async_save in a process of its own")),
    ],
)


def async_save(state: dict[str, Any], *, kind: str, **options: Any) -> Any:
    """``dcp.async_save`` on a ``"thread"`` or in a ``"process"``."""
    if _HAS_KINDS:
        options["async_checkpointer_type"] = dcp.state_dict_saver.AsyncCheckpointerType(kind)
    else:
        assert kind == "thread"
    return dcp.async_save(state, **options)


def _casts_move_nans() -> bool:
    values = torch.full((64,), -1, dtype=torch.int32).view(torch.float32)  # all NaN
    alone = torch.cat([part.half() for part in values.split(1)])
    return not torch.equal(alone.view(torch.int16), values.half().view(torch.int16))


_CASTS_MOVE_NANS = _casts_move_nans()  # 2.6


def comparable(tensor: torch.Tensor) -> torch.Tensor:
    """What can be compared bit for bit of a tensor that may have been cast to half precision.

    All of it, except where the bits of a NaN depend on its place in the tensor that was cast.
    """
    if _CASTS_MOVE_NANS and tensor.dtype == torch.float16:
        return torch.where(tensor.isnan(), torch.nan, tensor)
    return tensor


def complete_cpu_streams() -> None:
    """Give ``torch.cpu.Stream`` the no-ops that FSDP2 calls (2.7), so that it runs on CPU."""
    for name in ("record_event", "wait_event"):
        if not hasattr(torch.cpu.Stream, name):
            setattr(torch.cpu.Stream, name, lambda self, *event: torch.cpu.Event())


def forget_placements() -> None:
    """Clear what DTensor caches: placements hold meshes, and with them groups that are gone."""
    from torch.distributed.tensor import DTensor, debug

    if hasattr(debug, "_clear_sharding_prop_cache"):
        debug._clear_sharding_prop_cache()
        return
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
