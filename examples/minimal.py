"""Save and load all that FSDP1 trains: ``torchrun --nproc-per-node 2 examples/minimal.py``."""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from dcp_fsdp_osd import (
    FlatModelState,
    FlatOptimLoadPlanner,
    FlatOptimSavePlanner,
    FlatOptimState,
    StreamingReader,
    StreamingWriter,
    verify_model_state,
    verify_optim_state,
)


def build():
    model = FSDP(torch.nn.Linear(100, 7), device_id=torch.device("cpu"), use_orig_params=True)
    return model, torch.optim.AdamW(model.parameters())


dist.init_process_group("gloo")
path = [tempfile.mkdtemp()]
dist.broadcast_object_list(path)  # all ranks write to the same checkpoint

model, optim = build()
model(torch.randn(4, 100)).sum().backward()
optim.step()

state = {"model": FlatModelState(model), "optim": FlatOptimState(model, optim), "step": 1}
planner = FlatOptimSavePlanner(model, optim)
dcp.save(state, storage_writer=StreamingWriter(path[0]), planner=planner)

model, optim = build()  # other weights; another world and another wrapping would do as well
state = {"model": FlatModelState(model), "optim": FlatOptimState(model, optim), "step": 0}
planner = FlatOptimLoadPlanner(model, optim)
dcp.load(state, storage_reader=StreamingReader(path[0]), planner=planner)

assert state["step"] == 1
assert verify_model_state(model, path[0]).ok  # reads again, and compares bit for bit
assert verify_optim_state(model, optim, path[0]).ok
print(f"rank {dist.get_rank()}: loaded what was saved, no tensor left its rank")
dist.destroy_process_group()
