"""WGAN-GP with BatchNorm in the critic, whose penalty goes through the statistics of the whole batch."""

import torch
from torch import autograd, nn
from torch.utils.data import TensorDataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(20)
samestep.init()
train = samestep.loader(TensorDataset(torch.randn(37, 6)), batch_size=9, shuffle=True, drop_last=True)
G = nn.Sequential(nn.Linear(4, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 6))
D = nn.Sequential(
    nn.Linear(6, 12), nn.BatchNorm1d(12), nn.LeakyReLU(0.2), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 1)
)
G, D = samestep.replicate(G, same=True), samestep.replicate(D, same=True)
opt_g, opt_d = torch.optim.RMSprop(G.parameters(), 1e-3), torch.optim.RMSprop(D.parameters(), 1e-3)


def gradient_penalty(real, fake):
    alpha = torch.rand(real.size(0), 1).expand_as(real)
    mixed = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    scores = D(mixed)
    gradients = autograd.grad(
        outputs=scores,
        inputs=mixed,
        grad_outputs=torch.ones_like(scores),
        create_graph=True,
        retain_graph=True,
    )[0]
    return ((gradients.norm(2, dim=1) - 1) ** 2).mean()


for _ in range(3):
    for i, (real,) in enumerate(train):
        fake = G(torch.randn(real.size(0), 4))
        loss = D(fake.detach()).mean() - D(real).mean() + 10 * gradient_penalty(real, fake.detach())
        opt_d.zero_grad()
        loss.backward()
        opt_d.step()
        print("D", samestep.mean(loss.item()))
        if i % 2:
            loss = -D(G(torch.randn(real.size(0), 4))).mean()
            opt_g.zero_grad()
            loss.backward()
            opt_g.step()
            print("G", samestep.mean(loss.item()))
samestep.save("weights.pt", {**G.state_dict(), **{f"d.{k}": v for k, v in D.state_dict().items()}})
