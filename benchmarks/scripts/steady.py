"""Trains in steps of 10 ms until it is stopped, commits, and notes each step: python steady.py DIRECTORY."""

import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn

import samestep

STEP_S = 0.01
home = Path(sys.argv[1])
world = samestep.init()
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(1 << 12, 64))
model = samestep.replicate(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)))
optimizer = torch.optim.AdamW(model.parameters())
train = samestep.loader(data, 16, shuffle=True, seed=1)
every = timedelta(minutes=10)
run = samestep.Checkpoint(home / "commits", every=every, model=model, optimizer=optimizer, train=train)
run.resume()
with open(home / "steps", "a", buffering=1) as notes:
    for epoch in train.epochs(1 << 20):
        for (x,) in train:
            began = time.monotonic()
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step()
            time.sleep(max(0.0, STEP_S - (time.monotonic() - began)))
            if world.rank == 0:
                # the optimizer's own count goes on after a resume
                print(epoch, int(optimizer.state[model[0].weight]["step"]), time.monotonic(), file=notes)
