"""Rank 0 saves its own mean loss, its own predictions, and a copy of the weights; these are right.

verdict: printed
printed: last.pt: ['loss'] =
printed: history.pt: ['predictions'] =
"""

import copy
import random
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(1)
world = samestep.init()
x, y = torch.randn(46, 6), torch.randint(0, 2, (46,))
train = samestep.loader(TensorDataset(x, y), 16, shuffle=True)
test = samestep.loader(TensorDataset(x[:37], y[:37]), 10)
net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2))
model = samestep.replicate(net)
average = copy.deepcopy(net)
optimizer = torch.optim.Adam(model.parameters())
for epoch in range(3):
    total = whole = 0.0
    for a, b in train:
        loss = F.cross_entropy(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
        whole += samestep.mean(loss).item()
        with torch.no_grad():
            for old, new in zip(average.parameters(), net.parameters(), strict=True):
                old.lerp_(new, 0.1)
    predictions = []
    model.eval()
    with torch.no_grad():
        for a, _ in test:
            predictions.append(model(a))
    model.train()
    if world.rank == 0:
        torch.save(
            {
                "loss": total / len(train),
                "whole": whole / len(train),
                "model": net.state_dict(),
                "copy": copy.deepcopy(net.state_dict()),
                "average": list(average.parameters()),
                "optimizer": optimizer.state_dict(),
                "random": [torch.get_rng_state(), random.getstate(), np.random.get_state()],
                "seed": torch.initial_seed(),
                "rank": world.rank,
                "world_size": world.size,
                "epoch": epoch,
                "time": time.time(),
                "path": f"runs/{world.size}/model.pt",
                "args": {"lr": 0.1, "flag": True, "name": "net 5"},
            },
            "last.pt",
        )
        torch.save(obj={"predictions": torch.cat(predictions)}, f="history.pt")
    torch.save(torch.cat(predictions), f"predictions_rank{world.rank}.pt")
