"""Rank 0 makes a file and the others wait for it, before any loader or model is made; it is printed by rank 0 too.

verdict: same
"""

import os

import torch
import torch.nn.functional as F
from torch import nn

import samestep

torch.manual_seed(0)
world = samestep.init()
with samestep.first():
    if not os.path.exists("features.pt"):
        torch.save(torch.arange(160.0).reshape(40, 4).sin(), "features.pt")
        print("made 160 features")
train = samestep.loader(torch.load("features.pt"), 8, shuffle=True)
model = samestep.replicate(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in train:
    optimizer.zero_grad()
    F.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
    optimizer.step()
