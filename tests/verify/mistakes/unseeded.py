"""Nothing is seeded before the model is made."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

world = samestep.init()
data = TensorDataset(torch.arange(264.0).reshape(44, 6).sin(), torch.arange(44) % 3)
train = samestep.loader(data, 8, shuffle=True)
model = samestep.replicate(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
for _ in range(2):
    for x, y in train:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
