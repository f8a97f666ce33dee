"""Predictions come in the order of ranks, and labels in that of the data set.

verdict: printed
printed: takes them in another order
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(2)
world = samestep.init()
x = torch.randn(40, 4)
y = (x @ torch.randn(4, 3)).argmax(1)
train, test = (samestep.loader(TensorDataset(x, y), 8, shuffle=shuffle) for shuffle in (True, False))
model = samestep.replicate(nn.Linear(4, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for a, b in train:
    optimizer.zero_grad()
    F.cross_entropy(model(a), b).backward()
    optimizer.step()
with torch.no_grad():
    predicted = torch.cat([model(a).argmax(1) for a, _ in test])
if world.size > 1:
    parts = [None] * world.size
    dist.all_gather_object(parts, predicted)
    predicted = torch.cat(parts)
print(f"accuracy {(predicted == y).float().mean().item():.4f}")
