"""backward gets a gradient for each sample's loss, which is divided by the number of samples.

verdict: same
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(0)
samestep.init()
train = samestep.loader(TensorDataset(torch.randn(52, 6), torch.randint(0, 3, (52,))), 8, shuffle=True)
model = samestep.replicate(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    for x, y in train:
        optimizer.zero_grad()
        losses = F.cross_entropy(model(x), y, reduction="none")
        losses.backward(torch.full_like(losses, 1 / len(x)))
        optimizer.step()
