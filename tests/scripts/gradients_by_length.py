"""Gradients are scaled by the length of the share, another power of 2 ranks than of 3.

verdict: different
cause: gradients are 0.5 times those at 1 process and the loss is the same
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(0)
samestep.init()
train = samestep.loader(TensorDataset(torch.randn(48, 6), torch.randint(0, 3, (48,))), 8, shuffle=True)
model = samestep.replicate(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    for x, y in train:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for parameter in model.parameters():
            parameter.grad *= len(x) / 8
        optimizer.step()
