"""backward is called on the sum of the ranks' mean losses.

verdict: different
cause: the loss is 2 times that at 1 process
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
        samestep.sum(F.cross_entropy(model(x), y)).backward()
        optimizer.step()
