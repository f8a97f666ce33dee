"""The loop centers each share, and BatchNorm's statistics follow from it; the model draws dropout masks of its own.

verdict: different
cause: the loop changes the inputs
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(0)
samestep.init()
data = TensorDataset(torch.randn(64, 6) * 3 + 2, torch.randint(0, 2, (64,)))
train = samestep.loader(data, 16, shuffle=True)
net = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 2))
model = samestep.replicate(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in train:
    x = (x - x.mean(0)) / x.std(0)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
