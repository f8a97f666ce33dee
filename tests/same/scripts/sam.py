"""Sharpness-aware minimization: two forwards and backwards in a step, with dropout and a penalty by hand."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(19)
samestep.init()
train = samestep.loader(
    TensorDataset(torch.randn(31, 5), torch.randint(0, 3, (31,))), batch_size=7, shuffle=True
)
model = samestep.replicate(
    nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.AlphaDropout(0.1), nn.Linear(12, 3)), same=True
)
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loss_of(x, y):
    return F.cross_entropy(model(x), y) + 1e-2 * sum(p.pow(2).sum() for p in model.parameters())


for _ in range(3):
    for x, y in train:
        loss = loss_of(x, y)
        loss.backward()
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            steps = [0.05 * p.grad / (norm + 1e-12) for p in model.parameters()]
            for p, e in zip(model.parameters(), steps):
                p.add_(e)
        opt.zero_grad()
        loss_of(x, y).backward()
        with torch.no_grad():
            for p, e in zip(model.parameters(), steps):
                p.sub_(e)
        opt.step()
        opt.zero_grad()
        print(samestep.mean(loss.item()), norm.item())
samestep.save("weights.pt", model.state_dict())
