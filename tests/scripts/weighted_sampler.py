"""Classes are balanced by a WeightedRandomSampler.

verdict: same
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset, WeightedRandomSampler

import samestep

torch.manual_seed(0)
samestep.init()
labels = (torch.arange(40) % 7 == 0).long()
counts = labels.bincount().double()
sampler = WeightedRandomSampler((1 / counts)[labels], 40)
loader = samestep.loader(TensorDataset(torch.randn(40, 6), labels), 8, sampler=sampler)
model = samestep.replicate(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
