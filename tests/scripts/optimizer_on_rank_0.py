"""Of two optimizers the second steps on rank 0 alone.

verdict: different
cause: rank 1 took 12 steps and rank 0 24
sizes: 1,2
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(0)
world = samestep.init()
body, head = nn.Linear(6, 8), nn.Linear(8, 3)
loader = samestep.loader(TensorDataset(torch.randn(44, 6), torch.randint(0, 3, (44,))), 8, shuffle=True)
model = samestep.replicate(nn.Sequential(body, nn.Tanh(), head))
optimizer, other = torch.optim.SGD(body.parameters(), lr=0.1), torch.optim.Adam(head.parameters(), lr=0.01)
for _ in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        other.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if world.rank == 0:
            other.step()
