"""A learned temperature is no part of the replicated model.

verdict: failed
cause: belongs to no replica
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(0)
samestep.init()
loader = samestep.loader(TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,))), 8, shuffle=True)
model = samestep.replicate(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
temperature = nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)
for x, y in loader:
    optimizer.zero_grad()
    F.cross_entropy(model(x) / temperature, y).backward()
    optimizer.step()
