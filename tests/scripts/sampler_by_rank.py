"""A sampler takes every second sample, by rank.

verdict: failed
cause: world.rank
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(0)
world = samestep.init()
data = TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,)))
loader = samestep.loader(data, 6, sampler=range(world.rank, 40, world.size))
model = samestep.replicate(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in loader:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
