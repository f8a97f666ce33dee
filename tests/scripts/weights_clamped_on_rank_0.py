"""Rank 0 alone clamps the weights.

verdict: different
cause: code that only some ranks run changes
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(0)
world = samestep.init()
loader = samestep.loader(TensorDataset(torch.randn(40, 6)), 8, shuffle=True)
critic = samestep.replicate(nn.Linear(6, 1))
optimizer = torch.optim.RMSprop(critic.parameters(), lr=0.1)
for (x,) in loader:
    optimizer.zero_grad()
    critic(x).mean().backward()
    optimizer.step()
    if world.rank == 0:
        for parameter in critic.parameters():
            parameter.data.clamp_(-0.1, 0.1)
