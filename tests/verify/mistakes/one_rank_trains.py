"""Rank 0 alone trains."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(0)
world = samestep.init()
data = TensorDataset(torch.randn(44, 6), torch.randint(0, 3, (44,)))
train = samestep.loader(data, 8, shuffle=True)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
if world.rank == 0:
    for x, y in train:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
