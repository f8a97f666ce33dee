"""Noise and mixing weights drawn in the loop: some for each sample, some for the batch, some by NumPy and Python."""

import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(15)
np.random.seed(15)
random.seed(15)
world = samestep.init()
data = TensorDataset(torch.randn(37, 1, 6, 6), torch.randint(0, 4, (37,)))
train = samestep.loader(data, batch_size=8, shuffle=True)
model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4))
model = samestep.replicate(model.to(world.device), same=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    for x, y in train:
        target = F.one_hot(y, 4).double()
        other = torch.randn_like(x)
        weight = torch.rand(len(x), 1, 1, 1)
        x = weight * x + (1 - weight) * other + np.random.beta(0.4, 0.4) * torch.rand(1) * 0.1
        if torch.rand(1) < 0.5:
            x = x.flip(3)
        if random.random() < 0.5:
            x = x + torch.normal(torch.zeros_like(x), 0.1)
        x = torch.where(torch.rand(x.shape[0]).lt(0.3).view(-1, 1, 1, 1), -x, x)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        print(epoch, samestep.mean(loss.item()))
samestep.save("weights.pt", model.state_dict())
