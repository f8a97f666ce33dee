"""Adversarial training; the evaluation calls backward() too, on batches that ranks share in other sizes.

verdict: with_same
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(0)
samestep.init()
points = torch.randn(57, 6)
labels = (points[:, 0] > 0).long()
train = samestep.loader(TensorDataset(points[:38], labels[:38]), batch_size=10, shuffle=True)
test = samestep.loader(TensorDataset(points[38:], labels[38:]), batch_size=6)
model = samestep.replicate(nn.Sequential(nn.Linear(6, 12), nn.ELU(), nn.Linear(12, 2)))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(2):
    model.train()
    for x, y in train:
        near = (x + torch.empty_like(x).uniform_(-0.3, 0.3)).requires_grad_()
        (slope,) = torch.autograd.grad(F.cross_entropy(model(near), y), near)
        near = (x + 0.1 * slope.sign()).requires_grad_()
        F.cross_entropy(model(near), y, reduction="sum").backward(inputs=[near])
        loss = F.cross_entropy(model(x), y) + F.cross_entropy(model(x + 0.1 * near.grad.sign()), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    right = 0
    for x, y in test:
        x.requires_grad_()
        F.cross_entropy(model(x), y).backward()
        right += (model(x + 0.2 * x.grad.sign()).argmax(1) == y).sum().item()
    print(epoch, samestep.sum(right))
