"""Noise of which only the script's line tells where the samples are, with as many of other things as of samples."""

import torch
from torch import nn
from torch.distributions import Normal
from torch.utils.data import TensorDataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(6)
samestep.init()
# with two or three processes a share has as many samples as noise has draws
train = samestep.loader(TensorDataset(torch.randn(47, 6)), batch_size=10, shuffle=True)
model = samestep.replicate(nn.Linear(6, 6), same=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def drawn(n):
    return torch.randn(n)


for _ in range(2):
    for (x,) in train:
        n = len(x)
        noise = torch.rand(x.numel()).view_as(x) + drawn(6) * drawn(5).sum() + drawn(n)[:, None]
        noise += torch.randn(3, 6, len(x)).permute(2, 1, 0).mean(2)
        noise += torch.normal(x)
        noise += Normal(x, x.abs() + 0.1).rsample((4,)).mean(0)
        noise += Normal(x, x.abs() + 0.1).sample((5,)).mean(0)
        loss = (model(x) - noise).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(samestep.mean(loss.item()))
samestep.save("weights.pt", model.state_dict())
