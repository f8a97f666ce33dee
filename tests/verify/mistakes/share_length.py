"""A schedule's length is made from this rank's share."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(0)
world = samestep.init()
data = TensorDataset(torch.randn(44, 6), torch.randint(0, 3, (44,)))
train = samestep.loader(data, 8, shuffle=True)
model = samestep.replicate(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * len(train) // world.size)
for _ in range(2):
    for x, y in train:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
