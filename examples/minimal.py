"""The example of README.md: ``torchrun --nproc-per-node 2 examples/minimal.py``, twice."""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

import dcp_fsdp_osd as osd

dist.init_process_group("gloo")  # on GPUs "nccl", and each rank's GPU as device_id
model = FSDP(torch.nn.Linear(100, 7), device_id=torch.device("cpu"), use_orig_params=True)
optim = torch.optim.AdamW(model.parameters())
state = {"model": osd.FlatModelState(model), "optim": osd.FlatOptimState(model, optim), "step": 0}

Path("run").mkdir(exist_ok=True)
if newest := osd.latest("run"):  # the path of the newest complete checkpoint, or None
    reader = osd.StreamingReader(newest)
    dcp.load(state, storage_reader=reader, planner=osd.FlatOptimLoadPlanner())
for step in range(state["step"] + 1, state["step"] + 6):
    loss = model(torch.randn(4, 100)).square().mean()
    loss.backward()
    optim.step()
    optim.zero_grad()
    print(f"rank {dist.get_rank()}: step {step}, loss {loss.item():.3f}")

state["step"] = step
writer = osd.StreamingWriter(f"run/step-{step}")
dcp.save(state, storage_writer=writer, planner=osd.FlatOptimSavePlanner())
dist.destroy_process_group()
