"""The evaluation forgets model.eval(), and changes BatchNorm's statistics.

verdict: with_same
remark: an evaluation in training mode
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(0)
samestep.init()
data = TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,)))
train, test = samestep.loader(data, 8, shuffle=True), samestep.loader(data, 20)
model = samestep.replicate(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    for x, y in train:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    with torch.no_grad():
        correct = sum((model(x).argmax(1) == y).sum().item() for x, y in test)
    print(f"acc {samestep.sum(correct) / len(data):.3f}")
