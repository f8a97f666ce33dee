"""The second optimizer of a GAN has a learning rate that is multiplied by the number of processes.

verdict: different
cause: lr is 0.002 at 1 process and 0.004 at 2; every step has the whole batch
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(999)
world = samestep.init()
loader = samestep.loader(TensorDataset(torch.randn(40, 2) * 0.3 + 1), batch_size=16, shuffle=True)
G = samestep.replicate(nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 2)))
D = samestep.replicate(nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)))
opt_D = torch.optim.Adam(D.parameters(), lr=2e-3, betas=(0.5, 0.999))
opt_G = torch.optim.Adam(G.parameters(), lr=2e-3 * world.size, betas=(0.5, 0.999))
for (real,) in loader:
    fake = G(torch.randn(len(real), 4))
    d_loss = torch.relu(1 - D(real)).mean() + torch.relu(1 + D(fake.detach())).mean()
    opt_D.zero_grad()
    d_loss.backward()
    opt_D.step()
    g_loss = -D(fake).mean()
    opt_G.zero_grad()
    g_loss.backward()
    opt_G.step()
