"""The batch size is divided by the number of ranks, and then shared.

verdict: different
cause: batch_size, which is that of the whole step
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(0)
world = samestep.init()
loader = samestep.loader(
    TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,))), 12 // world.size, shuffle=True
)
model = samestep.replicate(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in loader:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
