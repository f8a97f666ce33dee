"""A diffusion model: a time step and noise for each sample, drawn in the loop; samples drawn after each epoch."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(34)
world = samestep.init()
points = torch.randn(38, 2)
kept = torch.linspace(0.9, 0.1, 10)


class Points(Dataset):
    def __len__(self):
        return len(points)

    def __getitem__(self, index):
        return points[index]


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time, self.body = (
            nn.Embedding(10, 4),
            nn.Sequential(nn.Linear(6, 16), nn.SiLU(), nn.Dropout(0.1), nn.Linear(16, 2)),
        )

    def forward(self, x, t):
        if self.training:
            dropped = torch.rand(t.shape) < 0.1
            t = t.masked_fill(dropped, 0)
        return self.body(torch.cat([x, self.time(t)], 1))


train = samestep.loader(Points(), batch_size=8, shuffle=True, num_workers=0)
model = samestep.replicate(Denoiser().to(world.device), same=True)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(3):
    model.train()
    for x in train:
        t = torch.randint(0, 10, (len(x),))
        noise = torch.randn_like(x)
        noised = kept[t].sqrt()[:, None] * x + (1 - kept[t]).sqrt()[:, None] * noise
        loss = F.mse_loss(model(noised, t), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print("loss", samestep.mean(loss.item()))
    model.eval()
    with torch.no_grad():
        x = torch.randn(6, 2)
        for step in reversed(range(10)):
            x = x - 0.1 * model(x, torch.full((6,), step)) + 0.05 * torch.randn_like(x)
        print(epoch, x.norm().item())
samestep.save("weights.pt", model.state_dict())
