"""Gradients of sums are divided by the share's own count, which is right where the shares are equal.

verdict: different
cause: scales or divides its own (by the number of its samples)
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(0)
samestep.init()
train = samestep.loader(TensorDataset(torch.randn(52, 6), torch.randint(0, 3, (52,))), 8, shuffle=True)
model = samestep.replicate(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    seen = 0
    for i, (x, y) in enumerate(train):
        F.cross_entropy(model(x), y, reduction="sum").backward()
        seen += len(x)
        if i % 2 or i + 1 == len(train):
            for p in model.parameters():
                p.grad /= seen
            optimizer.step()
            optimizer.zero_grad()
            seen = 0
