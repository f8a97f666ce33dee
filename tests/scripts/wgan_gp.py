"""WGAN with a gradient penalty and several critic steps.

verdict: with_same
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(11)
samestep.init()
loader = samestep.loader(TensorDataset(torch.randn(40, 6)), batch_size=10, shuffle=True)
gen = samestep.replicate(nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 6)))
critic = samestep.replicate(nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1)))
opt_critic = torch.optim.RMSprop(critic.parameters(), lr=5e-4)
opt_gen = torch.optim.RMSprop(gen.parameters(), lr=5e-4)
for _ in range(2):
    for step, (real,) in enumerate(loader):
        fake = gen(torch.randn(len(real), 4)).detach()
        mix = torch.rand(len(real), 1)
        between = (mix * real + (1 - mix) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        penalty = ((slope.norm(2, dim=1) - 1) ** 2).mean()
        loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
        opt_critic.zero_grad()
        loss.backward()
        opt_critic.step()
        if step % 2:
            opt_gen.zero_grad()
            (-critic(gen(torch.randn(len(real), 4))).mean()).backward()
            opt_gen.step()
