"""A running mean of the input, kept in a buffer by forward, and used there.

verdict: different
cause: the buffer mean is made of each rank's share
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep


class Centered(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.body = nn.Linear(6, 3)

    def forward(self, x):
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return self.body(x - self.mean)


torch.manual_seed(0)
samestep.init()
loader = samestep.loader(TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,))), 8, shuffle=True)
model = samestep.replicate(Centered())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
