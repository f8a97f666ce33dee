"""WGAN-GP: a gradient penalty between real and generated samples, two steps of the critic for one of the generator."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(11)
world = samestep.init()
train = samestep.loader(TensorDataset(torch.randn(43, 6)), batch_size=10, shuffle=True)
generator = nn.Sequential(nn.Linear(4, 12), nn.LayerNorm(12), nn.ReLU(), nn.Linear(12, 6))
critic = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Dropout(0.1), nn.Linear(12, 1))
generator = samestep.replicate(generator.to(world.device), same=True)
critic = samestep.replicate(critic.to(world.device), same=True)
critics = torch.optim.Adam(critic.parameters(), lr=0.01, betas=(0.0, 0.9))
generators = torch.optim.Adam(generator.parameters(), lr=0.01, betas=(0.0, 0.9))
for _ in range(3):
    for step, (real,) in enumerate(train):
        critics.zero_grad()
        fake = generator(torch.randn(len(real), 4)).detach()
        mix = torch.rand(len(real), 1)
        between = (mix * real + (1 - mix) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        penalty = ((slope.norm(2, dim=1) - 1) ** 2).mean()
        loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
        loss.backward()
        critics.step()
        print("critic", samestep.mean(loss.item()))
        if step % 2:
            generators.zero_grad()
            loss = -critic(generator(torch.randn(len(real), 4))).mean()
            loss.backward()
            generators.step()
            print("generator", samestep.mean(loss.item()))
samestep.save(
    "weights.pt", {**generator.state_dict(), **{f"critic.{k}": v for k, v in critic.state_dict().items()}}
)
