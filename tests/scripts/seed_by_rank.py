"""The seed is another one on each rank, and the data are made after it.

verdict: different
cause: world.rank
"""

import torch
import torch.nn.functional as F
from torch import nn

import samestep

world = samestep.init()
torch.manual_seed(1234 + world.rank)
x = torch.randn(40, 6)
y = (x.sum(1) > 0).long()
loader = samestep.loader([*zip(x, y)], 8, shuffle=True, seed=0, num_workers=0)
model = samestep.replicate(nn.Linear(6, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in loader:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
