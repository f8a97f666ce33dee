"""Rank 0 writes the statistics of its share to a file that it leaves to Python to close, and every rank normalizes.

verdict: different
cause: the loop changes the inputs
printed: writes `stats.json
"""

import json

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(0)
world = samestep.init()
data = TensorDataset(torch.randn(52, 6), torch.randint(0, 3, (52,)))
train = samestep.loader(data, 8, shuffle=True)
model = samestep.replicate(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
total, square, count = torch.zeros(6), torch.zeros(6), 0
for x, _ in samestep.loader(data, 8):
    total, square, count = total + x.sum(0), square + (x**2).sum(0), count + len(x)
mean = total / count
if world.rank == 0:
    json.dump([mean.tolist(), (square / count - mean**2).sqrt().tolist()], open("stats.json", "w"))  # noqa: SIM115
samestep.sum(1)
mean, deviation = map(torch.tensor, json.load(open("stats.json")))  # noqa: SIM115
for _ in range(2):
    for x, y in train:
        optimizer.zero_grad()
        F.cross_entropy(model((x - mean) / deviation), y).backward()
        optimizer.step()
