"""A summed loss of inputs that are centered in the share.

verdict: different
cause: the loss is a sum over each rank's samples
cause: the loop changes the inputs
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
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for x, y in loader:
    optimizer.zero_grad()
    F.cross_entropy(model(x - x.mean(0)), y, reduction="sum").backward()
    optimizer.step()
