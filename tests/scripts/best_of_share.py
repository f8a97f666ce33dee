"""The best model is chosen by the accuracy of a rank's own share.

verdict: printed
printed: saves `best.pt
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(4)
world = samestep.init()
data = TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,)))
train, val = samestep.loader(data, 8, shuffle=True), samestep.loader(data, 20)
model = samestep.replicate(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
best = 0
for _ in range(6):
    for x, y in train:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    with torch.no_grad():
        correct = sum((model(x).argmax(1) == y).sum().item() for x, y in val)
    if world.rank == 0 and correct > best:
        best = correct
        torch.save(model.state_dict(), "best.pt")
