"""A table of one rank's counts is printed over several lines.

verdict: printed
printed: and 2 more like it
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(0)
samestep.init()

x = torch.randn(48, 4)
data = TensorDataset(x, x[:, :3].argmax(1))
model = samestep.replicate(nn.Linear(4, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
for a, b in samestep.loader(data, 8, shuffle=True):
    optimizer.zero_grad()
    F.cross_entropy(model(a), b).backward()
    optimizer.step()
table = torch.zeros(3, 3, dtype=torch.long)
with torch.no_grad():
    for a, b in samestep.loader(data, 16):
        for label, guess in zip(b, model(a).argmax(1)):
            table[label, guess] += 1
print(table)
