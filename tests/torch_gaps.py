"""What the installed torch lacks of what tests use; nothing else in tests asks for its version.

A test of what it does not have is skipped by one of the marks here, which say so.  What tests need
of torch beside what they test is made up for by the functions here.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

__all__ = [
    "AVERAGES_ON_CPU",
    "COPIES_TO_STAGE",
    "HAS_FSDP2_ON_CPU",
    "HAS_NO_DIST",
    "HAS_STAGERS",
    "HAS_STORE_CLONE",
    "LOSES_TURNS",
    "PICKLES_SHORTLY",
    "VERSION",
    "async_kinds",
    "async_save",
    "comparable",
    "complete_torch",
    "forget_placements",
    "gap_in",
    "lacks",
    "let_groups_rest",
    "needs_groups_without_rank_0",
    "needs_save_without_collectives",
    "stock_fsspec",
    "train_fsdp2_on_cpu",
]


VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])

_ERRORS = {
    "unexpected keyword argument 'enable_plan_caching'": "plans kept from save to save",
    "unexpected keyword argument 'use_collectives'": "dcp.save(use_collectives=False)",
    "unexpected keyword argument 'ignored_params'": "fully_shard(ignored_params=...)",
    "unexpected keyword argument 'save_distributed'": "safetensors written in pieces",
    "sharding does not support uneven sharding": "FSDP2 over uneven tensor parallelism",
    "Dynamo only supports FSDP with use_orig_params=True": "compiled flat parameters of FSDP1",
    "assert self.mask_buffer.data is not None": "FSDP2 over an embedding's tensor parallelism",
    "has no option 'enable_plan_caching'": "plans kept from save to save",
    "not with this torch": "no_dist= in a process group",
    "shard_sizes=[0, 4], placement=rank:1/cpu) overlap": "ShardedTensors without rows",
    "required to save or load, but model state_dict is empty": "meta models' state",
}
"""Text of an error that torch before 2.11 raises itself, and what it lacks then."""


def gap_in(error: BaseException) -> str | None:
    """What this torch lacks, if ``error`` (of a test, of all its ranks) says that it lacks it."""
    failures = getattr(error, "failures", None)
    ranks = failures.values() if isinstance(failures, dict) else None
    texts = [str(error)] if ranks is None else [f"{f.message}\n{f.traceback}" for f in ranks]
    for sign, what in _ERRORS.items():
        if VERSION < (2, 11) and texts and all(sign in text for text in texts):
            return f"torch {torch.__version__} has no {what}"
    return None


def lacks(missing: bool, what: str) -> pytest.MarkDecorator:
    """Skips a test where ``missing``; says that this torch has no ``what``."""
    return pytest.mark.skipif(missing, reason=f"torch {torch.__version__} has no {what}")


_parameters = inspect.signature(dcp.save).parameters
needs_save_without_collectives = lacks(  # 2.9
    "use_collectives" not in _parameters, "dcp.save(use_collectives=False)"
)

HAS_NO_DIST = "no_dist" in _parameters  # 2.7; looked at before complete_torch
COPIES_TO_STAGE = VERSION >= (2, 7)
"""Whether ``async_save`` copies tensors that lie on the CPU already before it returns."""
HAS_STORE_CLONE = hasattr(dist.Store, "clone")  # 2.8
HAS_FSDP2_ON_CPU = hasattr(torch.cpu.Stream, "record_event")  # 2.7; likewise
AVERAGES_ON_CPU = VERSION >= (2, 9)
"""Whether gloo's reduce_scatter takes the mean where it is asked to; before, it takes the sum."""
LOSES_TURNS = Shard(0) == _StridedShard(0, split_factor=2)  # before 2.10
needs_groups_without_rank_0 = lacks(  # 2.7
    not hasattr(_DistWrapper(None, False, 0), "global_coordinator_rank"),
    "DCP in process groups without global rank 0",
)

PICKLES_SHORTLY = VERSION < (2, 7)
"""``torch.save`` of a number takes less than 1 KiB: what tools show of it has another unit."""
HAS_STAGERS = "async_stager" in inspect.signature(dcp.async_save).parameters  # 2.9 at the latest
_HAS_KINDS = hasattr(dcp.state_dict_saver, "AsyncCheckpointerType")  # 2.7
async_kinds = pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            "thread", marks=lacks(not COPIES_TO_STAGE, "async_save of tensors on the CPU")
        ),
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


def complete_torch() -> None:
    """Add what tests call everywhere, where it is missing and without effect on what they test.

    - No-ops of ``torch.cpu.Stream`` that FSDP2 calls (2.7).
    - ``dcp.save(no_dist=True)`` and ``dcp.load`` likewise (2.7), which without a process group say
      what is so anyway.
    - ``is_meta`` of a ShardedTensor without a local shard, which stock asks for a model's state.
    """
    for name in ("record_event", "wait_event"):
        if not hasattr(torch.cpu.Stream, name):
            setattr(torch.cpu.Stream, name, lambda self, *event: torch.cpu.Event())
    for name in ("save", "load"):
        call = getattr(dcp, name)
        if "no_dist" not in inspect.signature(call).parameters:
            setattr(dcp, name, _with_no_dist(call))

    if VERSION < (2, 8):
        from torch.distributed._shard.sharded_tensor import _sharded_op_impl

        @_sharded_op_impl(torch.Tensor.is_meta.__get__)
        def is_meta(types: Any, args: Any = (), kwargs: Any = None, pg: Any = None) -> bool:
            return any(shard.tensor.is_meta for shard in args[0].local_shards())


def let_groups_rest() -> None:
    """To be called before process groups are destroyed.

    Before torch 2.7 the destructor of a group waits for gloo's threads while it holds the GIL, for
    which they wait if they have yet to let go of the tensors of the last collective.
    """
    if VERSION < (2, 7):
        time.sleep(0.05)


def _with_no_dist(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def calls(*args: Any, no_dist: bool = False, **options: Any) -> Any:
        assert not (no_dist and dist.is_initialized()), "not with this torch"
        return call(*args, **options)

    return calls


def train_fsdp2_on_cpu(model: nn.Module) -> None:
    """Let FSDP2 train on CPU where it is made for CUDA alone (before 2.7), or takes the sums that
    gloo makes for the means that it asked for (2.8).
    """
    if AVERAGES_ON_CPU:
        return
    from torch.distributed.fsdp import FSDPModule

    if HAS_FSDP2_ON_CPU:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        return
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    def factors(shards: Any, replicas: Any, dtype: torch.dtype) -> tuple[float, float]:
        return 1.0, float(shards.size() * (replicas.size() if replicas else 1))

    collectives._get_gradient_divide_factors = factors  # gloo sums, but takes no average
    for module in model.modules():
        if isinstance(module, FSDPModule):
            group = module._get_fsdp_state()._fsdp_param_group
            if group is not None:  # gathering a second time breaks the backward
                group.post_forward_mesh_info = None  # as reshard_after_forward=False


def stock_fsspec(cls: Any, url: str, **options: Any) -> Any:
    """torch's ``FsspecReader`` or ``FsspecWriter``, which take options of the storage since 2.7."""
    own = inspect.signature(cls).parameters
    if any(p.kind is p.VAR_KEYWORD for p in own.values()):
        return cls(url, **options)
    if "sync_files" in own:
        options.setdefault("sync_files", False)  # asks a stream of bytes for a file's number
    storage = {key: options.pop(key) for key in [*options] if key not in own}
    protocol = url.partition("://")[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(fsspec.config.conf, protocol, storage)
        return cls(url, **options)


def forget_placements() -> None:
    """Clear what DTensor caches: placements and ways between them hold meshes, and with them groups
    that are gone, with their threads and sockets.
    """
    from torch.distributed.tensor import DTensor, _redistribute, debug

    planners = getattr(_redistribute, "clear_redistribute_planner_cache", None)
    if planners is not None:
        planners()
    infos = getattr(_redistribute, "_gen_transform_infos", None)
    if hasattr(infos, "cache_clear"):
        infos.cache_clear()
    if hasattr(debug, "_clear_sharding_prop_cache"):
        debug._clear_sharding_prop_cache()
        return
    if hasattr(debug, "_clear_fast_path_sharding_prop_cache"):  # 2.10
        debug._clear_fast_path_sharding_prop_cache()
        debug._clear_python_sharding_prop_cache()
        return
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
