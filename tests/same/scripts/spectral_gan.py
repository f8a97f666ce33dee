"""A GAN with spectral norm in the discriminator and weight norm in the generator, hinge losses, two optimizers."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.data import TensorDataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(10)
samestep.init()
train = samestep.loader(TensorDataset(torch.randn(38, 6)), batch_size=9, shuffle=True)
G = nn.Sequential(weight_norm(nn.Linear(3, 12)), nn.BatchNorm1d(12), nn.LeakyReLU(), nn.Linear(12, 6))
D = nn.Sequential(
    spectral_norm(nn.Linear(6, 12)), nn.LeakyReLU(), nn.Dropout(0.3), spectral_norm(nn.Linear(12, 1))
)
G, D = samestep.replicate(G, same=True), samestep.replicate(D, same=True)
opt_g, opt_d = torch.optim.Adam(G.parameters(), 2e-3), torch.optim.Adam(D.parameters(), 4e-3)
for _ in range(3):
    for (real,) in train:
        fake = G(torch.randn(real.size(0), 3))
        d_loss = F.relu(1 - D(real)).mean() + F.relu(1 + D(fake.detach())).mean()
        opt_d.zero_grad()
        d_loss.backward()
        opt_d.step()
        g_loss = -D(fake).mean()
        opt_g.zero_grad()
        g_loss.backward()
        opt_g.step()
        print(samestep.mean(d_loss.item()), samestep.mean(g_loss.item()))
samestep.save("weights.pt", {**G.state_dict(), **{f"d.{k}": v for k, v in D.state_dict().items()}})
