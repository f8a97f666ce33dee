"""Weights are decayed by hand, by the length of a rank's share of the batch.

verdict: different
cause: the same gradients give other weights: the loop changes them beside the optimizer
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(0)
samestep.init()
x = torch.randn(48, 6)
train = samestep.loader(TensorDataset(x, (x[:, 0] > 0).long()), 8, shuffle=True)
model = samestep.replicate(nn.Linear(6, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in train:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter * (len(x) / 8)
