"""A CSV file, and a file of JSON lines, have values of one rank's share.

verdict: printed
printed: writes `loss.csv
printed: writes `accuracy.jsonl
"""

import csv
import json
import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(0)
world = samestep.init()
data = TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,)))
train, test = samestep.loader(data, 8, shuffle=True), samestep.loader(data, 16)
model = samestep.replicate(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
lines = open("accuracy.jsonl" if world.rank == 0 else os.devnull, "w")  # noqa: SIM115
rows = []
for epoch in range(2):
    total = 0.0
    for x, y in train:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item()
    rows.append([epoch, total / len(train)])
    right = 0
    with torch.no_grad():
        for x, y in test:
            right += (model(x).argmax(1) == y).sum().item()
    lines.write(json.dumps({"epoch": epoch, "accuracy": right / len(data)}) + "\n")
if world.rank == 0:
    with open("loss.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["epoch", "loss"])
        table.writerows(rows)
