"""The loader's seed is made from the number of ranks.

verdict: different
cause: the order of samples depends on the number of processes
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(0)
world = samestep.init()
loader = samestep.loader(
    TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,))), 8, shuffle=True, seed=100 * world.size
)
model = samestep.replicate(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in loader:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
