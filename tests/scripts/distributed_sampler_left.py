"""A DistributedSampler is left in samestep.loader.

verdict: failed
cause: get_rank()
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
from torch.utils.data.distributed import DistributedSampler

import samestep

torch.manual_seed(0)
world = samestep.init()
data = TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,)))
sampler = DistributedSampler(data) if world.size > 1 else torch.utils.data.RandomSampler(data)
loader = samestep.loader(data, 6, sampler=sampler)
model = samestep.replicate(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in loader:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
