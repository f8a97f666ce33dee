"""A GAN's discriminator trains on samples made without gradients: these change BatchNorm, as in the serial script.

verdict: with_same
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(0)
samestep.init()
train = samestep.loader(TensorDataset(torch.randn(40, 6)), 8, shuffle=True)
generator = samestep.replicate(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 6)))
critic = samestep.replicate(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)))
of_generator = torch.optim.SGD(generator.parameters(), lr=0.1)
of_critic = torch.optim.SGD(critic.parameters(), lr=0.1)
for _ in range(2):
    for (x,) in train:
        with torch.no_grad():
            made = generator(torch.randn(len(x), 4))
        of_critic.zero_grad()
        (critic(made).mean() - critic(x).mean()).backward()
        of_critic.step()
        of_generator.zero_grad()
        (-critic(generator(torch.randn(len(x), 4))).mean()).backward()
        of_generator.step()
