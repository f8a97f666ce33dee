"""Diffusion: steps drawn for each sample, labels dropped for guidance, an averaged copy that draws images."""

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(3)
samestep.init()
T = 20
beta = torch.linspace(1e-3, 0.2, T)
bar = torch.cumprod(1 - beta, 0)
dataset = TensorDataset(torch.randn(31, 1, 4, 4), torch.randint(0, 5, (31,)))


class Unet(nn.Module):
    def __init__(self):
        super().__init__()
        self.time, self.label = nn.Embedding(T, 8), nn.Embedding(6, 8)
        self.down, self.up = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 1, 3, padding=1)
        self.norm, self.drop = nn.GroupNorm(2, 8), nn.Dropout2d(0.1)

    def forward(self, x, t, y):
        h = self.down(x) + (self.time(t) + self.label(y))[:, :, None, None]
        return self.up(self.drop(F.silu(self.norm(h))))


net = Unet()
ema = copy.deepcopy(net).eval().requires_grad_(False)
net = samestep.replicate(net, same=True)
loader = samestep.loader(dataset, batch_size=8, shuffle=True)
opt = torch.optim.Adam(net.parameters(), 1e-2)
for _ in range(3):
    for x0, y in loader:
        t = torch.randint(0, T, (x0.shape[0],))
        noise = torch.randn_like(x0)
        a = bar[t][:, None, None, None]
        xt = a.sqrt() * x0 + (1 - a).sqrt() * noise
        y = torch.where(torch.rand(y.shape[0]) < 0.2, torch.full_like(y, 5), y)
        loss = F.mse_loss(net(xt, t, y), noise)
        opt.zero_grad()
        loss.backward()
        opt.step()
        with torch.no_grad():
            for p, q in zip(ema.parameters(), net.parameters()):
                p.lerp_(q, 0.05)
        print(samestep.mean(loss.item()))
    with torch.no_grad():
        x = torch.randn(4, 1, 4, 4)
        for i in reversed(range(T)):
            t = torch.full((4,), i)
            eps = ema(x, t, torch.tensor([0, 1, 2, 5]))
            x = (x - beta[i] / (1 - bar[i]).sqrt() * eps) / (1 - beta[i]).sqrt()
            if i > 0:
                x = x + beta[i].sqrt() * torch.randn_like(x)
        print("sampled", x.abs().mean().item())
samestep.save("weights.pt", {**net.state_dict(), **{f"ema.{k}": v for k, v in ema.state_dict().items()}})
