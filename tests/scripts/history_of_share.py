"""The losses of each epoch are written to a file of JSON, of one rank's share.

verdict: printed
printed: writes `history.json
"""

import json

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(0)
world = samestep.init()
loader = samestep.loader(TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,))), 8, shuffle=True)
model = samestep.replicate(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
history = []
for _ in range(2):
    total = 0.0
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item()
    history.append(total / len(loader))
if world.rank == 0:
    with open("history.json", "w") as file:
        json.dump(history, file)
