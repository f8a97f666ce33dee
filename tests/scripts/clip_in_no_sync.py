"""Gradients are clipped before they are exchanged.

verdict: different
cause: is inside no_sync
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(0)
samestep.init()
loader = samestep.loader(TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,))), 8, shuffle=True)
model = samestep.replicate(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i, (x, y) in enumerate(loader):
    with samestep.no_sync(model, enabled=i % 2 == 0):
        F.cross_entropy(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    if i % 2:
        optimizer.step()
        optimizer.zero_grad()
