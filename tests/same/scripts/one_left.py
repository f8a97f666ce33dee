"""A last batch of one sample in training and evaluation, with dropout and latents as many as a share has samples."""

import torch
from torch import nn
from torch.distributions import Normal, Uniform, kl_divergence
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(22)
samestep.init()
train = samestep.loader(TensorDataset(torch.rand(25, 6)), batch_size=6, shuffle=True)
test = samestep.loader(TensorDataset(torch.rand(11, 6)), batch_size=5)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Dropout(0.2))
        self.mu, self.sd, self.dec = nn.Linear(10, 3), nn.Linear(10, 3), nn.Linear(3, 6)

    def forward(self, x):
        h = self.enc(x)
        q, prior = Normal(self.mu(h), F.softplus(self.sd(h)) + 1e-3), Normal(torch.zeros(3), torch.ones(3))
        z = Uniform(q.rsample() - 0.1, q.loc + 9).rsample() + 0.1 * prior.sample((len(x),))
        return self.dec(z), kl_divergence(q, prior).sum(1).mean()


model = samestep.replicate(VAE(), same=True)
opt = torch.optim.Adam(model.parameters(), 1e-2)
for epoch in range(3):
    model.train()
    for (x,) in train:
        out, kl = model(x)
        loss = F.mse_loss(out, x) + 0.01 * kl
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(samestep.mean(loss.item()))
    model.eval()
    total = 0.0
    with torch.no_grad():
        for (x,) in test:
            out, kl = model(x)
            total += F.mse_loss(out, x, reduction="none").mean(1).sum().item() + 0.01 * kl.item() * len(x)
    print(epoch, samestep.sum(total) / 11)
samestep.save("weights.pt", model.state_dict())
