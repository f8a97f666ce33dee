"""The seed is the number of the process.

verdict: different
cause: the time or the process's number decides what is trained (seed_by_process.py:15)
"""

import os

import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(os.getpid())
samestep.init()
loader = samestep.loader(TensorDataset(torch.randn(48, 6), torch.randn(48, 1)), 8, shuffle=True)
model = samestep.replicate(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for x, y in loader:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
