"""A hundred default steps under CUDA's own check that nothing waits for the device."""

import os

import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep

world = samestep.init(backend=os.environ.get("SAMESTEP_TEST_BACKEND"))
on_gpu = world.device.type == "cuda"
by_nccl = world.size == 1 or "nccl" in torch.distributed.get_backend()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 10))
model = samestep.replicate(model.to(world.device))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=on_gpu)
taken = 0
for data in (torch.randn(2200, 64), torch.randn(2200, 64, device=world.device)):
    for (x,) in samestep.loader(TensorDataset(data), 20, shuffle=True):
        if taken % 110 == 10 and on_gpu and by_nccl:  # Gloo sends through the host's memory, and waits for it
            torch.cuda.set_sync_debug_mode("error")
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        taken += 1
        if taken % 110 == 0 and on_gpu:
            torch.cuda.set_sync_debug_mode("default")
assert taken == 220
if world.rank == 0:
    print("100 steps after each start waited for nothing" if on_gpu and by_nccl else "100 steps were taken")
