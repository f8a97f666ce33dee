"""An epoch ends where the loss of a rank is small.

verdict: failed
cause: it is decided by a value of each rank's own share
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(0)
samestep.init()
loader = samestep.loader(TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,))), 4, shuffle=True)
model = samestep.replicate(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
for _ in range(6):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        if loss.item() < 0.9:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
