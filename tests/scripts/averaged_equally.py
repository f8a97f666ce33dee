"""Gradients are averaged by hand over the ranks, whose shares are not of equal size.

verdict: different
cause: averaged by hand with equal weights for unequal shares
sizes: 1,3
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(2)
world = samestep.init()
train = samestep.loader(TensorDataset(torch.randn(40, 4), torch.randn(40, 1)), 8, shuffle=True)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for x, y in train:
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    if world.size > 1:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world.size
    optimizer.step()
