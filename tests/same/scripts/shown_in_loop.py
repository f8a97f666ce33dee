"""Draws whose size is none of the batch, but is as large as a share of it: 4 pictures to show, 4 particles."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(8)
samestep.init()
SHOWN = 4
train = samestep.loader(TensorDataset(torch.randn(47, 6)), batch_size=12, shuffle=True)


class Particles(nn.Module):
    def __init__(self, particles):
        super().__init__()
        self.particles = particles
        self.encoder, self.decoder = (
            nn.Linear(6, 4),
            nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 6)),
        )

    def noise(self, rows):
        return torch.randn(self.particles, rows, 2)

    def forward(self, x, noise):
        middle, spread = self.encoder(x).chunk(2, 1)
        return self.decoder(middle + noise * spread.exp())


@torch.no_grad()
def shown(model, count, scale=1.0):
    found = scale * torch.randn(count, 2)
    for _ in range(2):
        found = found + 0.1 * torch.randn((count, 2))
    return model.decoder(found).sum().item()


model = samestep.replicate(Particles(particles=4), same=True)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range(3):
    for step, (x,) in enumerate(train):
        loss = (model(x, model.noise(x.size(0))) - x).square().mean(2).logsumexp(0).mean()
        loss = loss + 0.1 * (torch.rand(len(x)) * x.mean(1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(samestep.mean(loss.item()), shown(model, SHOWN) if step % 2 else 0)
samestep.save("weights.pt", model.state_dict())
