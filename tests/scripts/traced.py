"""The model is traced before it is replicated.

verdict: same
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(0)
samestep.init()

data = TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,)))
net = torch.jit.trace(nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 3)), torch.randn(2, 6))
model = samestep.replicate(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in samestep.loader(data, 8, shuffle=True):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
