"""collate_fn standardizes what it gets, which by default is a share, and the model has dropout beside.

verdict: with_same
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(0)
samestep.init()


def collate(samples):
    x, y = torch.utils.data.default_collate(samples)
    return (x - x.mean(0)) / (x.std(0) + 0.1), y


data = TensorDataset(torch.randn(52, 6), torch.randint(0, 3, (52,)))
train = samestep.loader(data, 8, shuffle=True, drop_last=True, collate_fn=collate)
model = samestep.replicate(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    for x, y in train:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
