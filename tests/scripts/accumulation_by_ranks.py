"""The number of batches in a step is divided by the number of ranks.

verdict: different
cause: world.size
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(0)
world = samestep.init()
loader = samestep.loader(TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,))), 4, shuffle=True)
model = samestep.replicate(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
every = max(1, 4 // world.size)
for i, (x, y) in enumerate(loader):
    (F.cross_entropy(model(x), y) / every).backward()
    if (i + 1) % every == 0:
        optimizer.step()
        optimizer.zero_grad()
