"""A deep network with max and relu at a high rate amplifies rounding; nothing is wrong with it.

verdict: same
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(0)
samestep.init()
loader = samestep.loader(TensorDataset(torch.randn(64, 8), torch.randint(0, 4, (64,))), 16, shuffle=True)
layers = [part for _ in range(5) for part in (nn.Linear(8, 8), nn.ReLU())]
model = samestep.replicate(nn.Sequential(*layers, nn.Linear(8, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=1.5, momentum=0.9)
for _ in range(30):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
