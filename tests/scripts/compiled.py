"""The model is compiled after replicate; torch warns, at another line than at one process, of the hooks of verify.

verdict: same
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(0)
samestep.init()
train = samestep.loader(TensorDataset(torch.randn(48, 6), torch.randint(0, 3, (48,))), 8, shuffle=True)
model = samestep.replicate(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model = torch.compile(model, backend="eager")
for _ in range(2):
    for x, y in train:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
print(samestep.mean(F.cross_entropy(model(x), y).item()))
