"""Adversarial training, with an evaluation that calls backward() on a last batch of one sample."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(4)
samestep.init()
points = torch.randn(57, 6)
labels = (points[:, 0] + points[:, 1] > 0).long()
train = samestep.loader(TensorDataset(points[:38], labels[:38]), batch_size=10, shuffle=True)
test = samestep.loader(TensorDataset(points[38:], labels[38:]), batch_size=6)


def attacked(model, x, y, size=0.3, pace=0.1):
    found = x + torch.empty_like(x).uniform_(-size, size)
    for _ in range(3):
        found = found.clone().detach().requires_grad_()
        (slope,) = torch.autograd.grad(F.cross_entropy(model(found), y), found)
        along = slope / slope.norm(dim=1, keepdim=True).clamp(min=1e-8)
        found = x + (found.detach() + pace * along - x).clamp(-size, size)
    return found.detach()


model = samestep.replicate(nn.Sequential(nn.Linear(6, 24), nn.ELU(), nn.Linear(24, 2)), same=True)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(3):
    model.train()
    for x, y in train:
        loss = F.cross_entropy(model(x), y) + F.cross_entropy(model(attacked(model, x, y)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(samestep.mean(loss.item()))
    model.eval()
    right = robust = 0
    for x, y in test:
        x = x.clone().requires_grad_()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            right += (model(x).argmax(1) == y).sum().item()
            robust += (model(x + 0.2 * x.grad.sign()).argmax(1) == y).sum().item()
    print(epoch, samestep.sum(right), samestep.sum(robust))
samestep.save("weights.pt", model.state_dict())
