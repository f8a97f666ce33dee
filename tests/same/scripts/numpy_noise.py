"""A WGAN whose noise is drawn by NumPy, with dropout behind it; mixing weights by NumPy, some for all, some by row."""

import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(7)
np.random.seed(7)
random.seed(7)
world = samestep.init()
train = samestep.loader(TensorDataset(torch.randn(43, 6)), batch_size=10, shuffle=True)
generator = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 6))
critic = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Dropout(0.2), nn.Linear(12, 1))
generator, critic = (samestep.replicate(net.to(world.device), same=True) for net in (generator, critic))
critics = torch.optim.SGD(critic.parameters(), lr=0.02)
generators = torch.optim.SGD(generator.parameters(), lr=0.02)
shown = np.random.normal(size=(5, 4))  # as many as one of three ranks has samples
for _ in range(3):
    for step, (real,) in enumerate(train):
        weight, gamma = np.random.beta(0.4, 0.4), np.random.gamma(2.0, size=(len(real), 1))
        real = weight * real + (1 - weight) * torch.from_numpy(np.random.rand(*real.shape)) * gamma
        kept = torch.as_tensor(np.random.random((real.shape[0], 1)) < 0.8)
        classes = torch.tensor(np.random.choice(4, size=len(real), p=[0.1, 0.2, 0.3, 0.4]))
        signs = torch.tensor(random.choices((-1.0, 1.0), k=len(real)))
        shape = (len(real),)
        spots = torch.randint(0, 6, shape) + torch.rand(*shape) + torch.normal(0.0, 1.0, size=shape)
        real[torch.arange(len(real)), spots.long() % 6] *= spots
        critics.zero_grad()
        noise = torch.Tensor(np.random.normal(0, 1, (real.shape[0], 4))).double()
        fake = generator(noise).detach()
        spread = torch.from_numpy(np.random.normal(fake.numpy(), 0.1))
        loss = (critic(fake + spread) * kept).mean() - (
            critic(real * signs[:, None]).T @ (1.0 + classes) / len(real)
        ).mean()
        loss.backward()
        critics.step()
        for p in critic.parameters():
            p.data.clamp_(-0.5, 0.5)
        print("critic", samestep.mean(loss.item()))
        if step % 2 and np.random.rand() < 0.8:
            generators.zero_grad()
            noise = torch.tensor(np.random.uniform(-1, 1, size=(real.size(0), 4)))
            loss = -critic(generator(noise)).mean()
            loss.backward()
            generators.step()
            print("generator", samestep.mean(loss.item()), np.random.randint(9), random.random())
    with torch.no_grad():
        print(generator(torch.as_tensor(shown)).sum().item(), np.random.randint(0, 9, 5).sum())
samestep.save(
    "weights.pt", {**generator.state_dict(), **{f"critic.{k}": v for k, v in critic.state_dict().items()}}
)
