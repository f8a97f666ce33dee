"""A convolution's bias before BatchNorm, under Adam: its true gradient is zero.

verdict: with_same
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(0)
samestep.init()
loader = samestep.loader(TensorDataset(torch.randn(40, 2, 6, 6), torch.randint(0, 3, (40,))), 8, shuffle=True)
net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3))
model = samestep.replicate(net)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
