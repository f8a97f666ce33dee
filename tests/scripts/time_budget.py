"""Trains for so many seconds.

verdict: different
cause: the time or the process's number decides what is trained (time_budget.py
"""

import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(0)
samestep.init()
loader = samestep.loader(TensorDataset(torch.randn(48, 6), torch.randint(0, 3, (48,))), 8, shuffle=True)
model = samestep.replicate(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
deadline = time.time() + 0.4
epoch = 0
while time.time() < deadline:
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    epoch += 1
print("epochs", epoch > 0)
