"""SimCLR: two views made by the loop, a projection head with BatchNorm, a loss over all pairs of the whole batch."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(5)
samestep.init()
train = samestep.loader(TensorDataset(torch.rand(46, 3, 6, 6)), batch_size=12, shuffle=True)


def augment(x):
    n = len(x)
    x = torch.where((torch.rand(n, 1, 1, 1) < 0.5), x.flip(-1), x)
    x = x * torch.empty(n, 1, 1, 1).uniform_(0.6, 1.4) + 0.05 * torch.randn_like(x)
    top, left = torch.randint(0, 3, (n,)), torch.randint(0, 3, (n,))
    return torch.stack(
        [image[:, i : i + 4, j : j + 4] for image, i, j in zip(x, top.tolist(), left.tolist())]
    )


class SimCLR(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten())
        self.head = nn.Sequential(nn.Linear(24, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x):
        return F.normalize(self.head(self.encoder(x)), dim=1)


def nt_xent(first, second, temperature=0.5):
    z = torch.cat([first, second])
    sim = (z @ z.T / temperature).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
    n = len(first)
    return F.cross_entropy(sim, torch.cat([torch.arange(n) + n, torch.arange(n)]))


model = samestep.replicate(SimCLR(), same=True)
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 3)
for _ in range(3):
    for (x,) in train:
        loss = nt_xent(samestep.gather(model(augment(x))), samestep.gather(model(augment(x))))
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(loss.item())
    sched.step()
samestep.save("weights.pt", model.state_dict())
