"""Each rank has a seed of its own for its dropout masks, set after data and model, as many scripts for DDP have it.

verdict: with_same
"""

import torch
import torch.nn.functional as F
from torch import nn

import samestep

world = samestep.init()
torch.manual_seed(1234)
x = torch.randn(40, 6)
y = (x.sum(1) > 0).long()
loader = samestep.loader([*zip(x, y)], 8, shuffle=True, seed=0)
model = samestep.replicate(nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.Linear(16, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1234 + world.rank)
for x, y in loader:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
