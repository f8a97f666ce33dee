"""Profiles three steps of rank 0 with torch.profiler and prints the operations that took most of the time."""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch.profiler import profile
from torch.utils.data import TensorDataset

import samestep

world = samestep.init()
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(96, 8), torch.randint(0, 3, (96,)))
train = samestep.loader(dataset, batch_size=32, shuffle=True)
model = samestep.replicate(torch.nn.Linear(8, 3).to(world.device))
optimizer = torch.optim.SGD(model.parameters(), 0.1)

with profile() if world.rank == 0 else nullcontext() as profiler:
    for x, y in train:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

if profiler:
    profiler.export_chrome_trace("trace.json")
    print(profiler.key_averages().table(sort_by="cpu_time_total", row_limit=8))
