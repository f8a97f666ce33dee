"""A sampler of the script's own takes a share of what samestep.loader shares again."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Sampler, TensorDataset

import samestep

torch.manual_seed(0)
world = samestep.init()
data = TensorDataset(torch.randn(44, 6), torch.randint(0, 3, (44,)))


class EachNth(Sampler[int]):
    def __iter__(self):
        return iter(range(0, 44, world.size))

    def __len__(self):
        return len(range(0, 44, world.size))


train = samestep.loader(data, 8, sampler=EachNth())
model = samestep.replicate(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
for _ in range(2):
    for x, y in train:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
