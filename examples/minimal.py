"""Save and load FSDP1's optimizer state: ``torchrun --nproc-per-node 2 examples/minimal.py``."""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from dcp_fsdp_osd import (
    FlatOptimLoadPlanner,
    FlatOptimSavePlanner,
    StreamingReader,
    StreamingWriter,
)

dist.init_process_group("gloo")
path = [tempfile.mkdtemp()]
dist.broadcast_object_list(path)  # all ranks write to the same checkpoint

model = FSDP(torch.nn.Linear(100, 7), device_id=torch.device("cpu"), use_orig_params=True)
optim = torch.optim.AdamW(model.parameters())
model(torch.randn(4, 100)).sum().backward()
optim.step()

planner = FlatOptimSavePlanner(model, optim)
dcp.save({"optim": optim.state_dict()}, storage_writer=StreamingWriter(path[0]), planner=planner)

fresh = torch.optim.AdamW(model.parameters())
state = {"optim": {}}  # filled with this rank's pieces, whatever the world that saved them
planner = FlatOptimLoadPlanner(model, fresh)
dcp.load(state, storage_reader=StreamingReader(path[0]), planner=planner)
fresh.load_state_dict(state["optim"])

for parameter, saved in optim.state.items():  # a rank has none for what it holds nothing of
    assert torch.equal(fresh.state[parameter]["exp_avg"], saved["exp_avg"])
print(f"rank {dist.get_rank()}: loaded what was saved, no tensor left its rank")
dist.destroy_process_group()
