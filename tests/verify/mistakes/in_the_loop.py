"""What the loop computes from a rank's share, or does on one rank: the mistake is named as an argument."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

mistake = sys.argv[1]
torch.manual_seed(0)
world = samestep.init()
data = TensorDataset(torch.randn(44, 6), torch.randint(0, 3, (44,)))
train = samestep.loader(data, 8, shuffle=True)
model = samestep.replicate(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
for x, y in train:
    if mistake == "mean":
        x = x - x.mean(0)
    if mistake == "mixed":
        x = x + x[torch.randperm(len(x))]
    losses = F.cross_entropy(model(x), y, reduction="none")
    loss = losses.mean()
    if mistake == "largest":
        loss = losses.topk(2)[0].mean()
    if mistake == "count":
        loss = losses[y > 0].sum() / (y > 0).sum()
    optimizer.zero_grad()
    loss.backward()
    if mistake == "noise":
        torch.manual_seed(world.rank)
        for parameter in model.parameters():
            parameter.grad += 1e-3 * torch.randn_like(parameter)
    optimizer.step()
    if mistake == "schedule" and world.rank == 0:
        schedule.step()
