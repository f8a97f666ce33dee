"""An importance-weighted autoencoder: several numbers ahead of each sample, and noise like an expanded tensor."""

import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(4)
samestep.init()
# with three processes a share has as many samples as there are particles and latent numbers, or one
train = samestep.loader(TensorDataset(torch.rand(31, 6)), batch_size=9, shuffle=True)


class Particles(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 6), nn.Linear(3, 6)

    def forward(self, x, particles=3):
        times = torch.linspace(0, 1, 6).expand(len(x), 6)
        mean, spread = self.encoder(x + 0.1 * torch.rand_like(times)).chunk(2, 1)
        known = torch.distributions.Normal(mean, spread.exp())
        by_hand = mean + spread.exp() * torch.randn(particles, *mean.shape)
        z = torch.stack((known.rsample((particles,)), by_hand))
        fits = -F.mse_loss(self.decoder(z), x.expand(2, particles, -1, -1), reduction="none").sum(-1)
        weights = fits - z.square().sum(-1) / 2 - known.log_prob(z).sum(-1)
        return -(weights.logsumexp(1) - math.log(particles)).sum(0)


model = samestep.replicate(Particles(), same=True)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range(3):
    for (x,) in train:
        loss = model(x).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(samestep.mean(loss.item()))
samestep.save("weights.pt", model.state_dict())
