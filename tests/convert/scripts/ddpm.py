import math
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(42)
T = 20
betas = torch.linspace(1e-4, 0.2, T)
alphas_cumprod = torch.cumprod(1 - betas, dim=0)


def extract(a, t, shape):
    return a.gather(-1, t).reshape(t.shape[0], *((1,) * (len(shape) - 1)))


def q_sample(x0, t, noise=None):
    if noise is None:
        noise = torch.randn_like(x0)
    return extract(alphas_cumprod.sqrt(), t, x0.shape) * x0 + extract((1 - alphas_cumprod).sqrt(), t, x0.shape) * noise


class Eps(nn.Module):
    def __init__(self):
        super().__init__()
        self.t = nn.Embedding(T, 8)
        self.net = nn.Sequential(nn.Linear(10, 32), nn.SiLU(), nn.Linear(32, 2))

    def forward(self, x, t):
        return self.net(torch.cat([x, self.t(t)], -1))


def p_losses(model, x0, t):
    noise = torch.randn_like(x0)
    return F.smooth_l1_loss(noise, model(q_sample(x0, t, noise), t))


@torch.no_grad()
def sample(model, n):
    x = torch.randn(n, 2)
    for i in reversed(range(T)):
        t = torch.full((n,), i, dtype=torch.long)
        x = (x - betas[i] / (1 - alphas_cumprod[i]).sqrt() * model(x, t)) / (1 - betas[i]).sqrt()
        if i > 0:
            x = x + betas[i].sqrt() * torch.randn_like(x)
    return x


theta = torch.rand(75) * 2 * math.pi
data = torch.stack([theta.cos(), theta.sin()], 1)
dataloader = DataLoader(TensorDataset(data), batch_size=16, shuffle=True)
model = Eps()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(2):
    for step, (batch,) in enumerate(dataloader):
        optimizer.zero_grad()
        t = torch.randint(0, T, (batch.shape[0],)).long()
        loss = p_losses(model, batch, t)
        if step % 2 == 0:
            print("Loss:", loss.item())
        loss.backward()
        optimizer.step()
print(sample(model, 6).norm(dim=1).mean().item())
