"""A VQ-VAE whose codebook is a running mean of what is near each code, with unused codes drawn anew."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(9)
samestep.init()
train = samestep.loader(TensorDataset(torch.rand(37, 1, 6, 6)), batch_size=9, shuffle=True)


class Quantizer(nn.Module):
    def __init__(self, codes=7, width=4, decay=0.9):
        super().__init__()
        self.decay = decay
        self.register_buffer("codebook", torch.randn(codes, width))
        self.register_buffer("count", torch.ones(codes))
        self.register_buffer("total", self.codebook.clone())

    def forward(self, z):
        flat = z.permute(0, 2, 3, 1).reshape(-1, z.shape[1])
        chosen = torch.cdist(flat, self.codebook).argmin(1)
        if self.training:
            with torch.no_grad():
                hot = F.one_hot(chosen, len(self.codebook)).to(flat.dtype)
                self.count.mul_(self.decay).add_(samestep.sum(hot.sum(0)), alpha=1 - self.decay)
                self.total.mul_(self.decay).add_(samestep.sum(hot.T @ flat), alpha=1 - self.decay)
                self.codebook.copy_(self.total / self.count[:, None].clamp(min=1e-5))
                dead = self.count < 0.05
                self.codebook[dead] = torch.randn(int(dead.sum()), flat.shape[1])
        q = F.embedding(chosen, self.codebook).view(z.shape[0], *z.shape[2:], -1).permute(0, 3, 1, 2)
        return z + (q - z).detach(), F.mse_loss(z, q.detach())


class VQVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Conv2d(1, 8, 2, 2), nn.ReLU(), nn.Dropout(0.1), nn.Conv2d(8, 4, 1))
        self.vq = Quantizer()
        self.dec = nn.Sequential(nn.ConvTranspose2d(4, 8, 2, 2), nn.ReLU(), nn.Conv2d(8, 1, 1))

    def forward(self, x):
        q, commit = self.vq(self.enc(x + 0.1 * torch.randn_like(x)))
        return self.dec(q), commit


model = samestep.replicate(VQVAE(), same=True)
opt = torch.optim.Adam(model.parameters(), 5e-3)
for _ in range(3):
    for (x,) in train:
        out, commit = model(x)
        loss = F.mse_loss(out, x) + 0.25 * commit
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(samestep.mean(loss.item()))
samestep.save("weights.pt", model.state_dict())
