"""A dataset that draws from a generator of its own, without a seed.

verdict: different
cause: no seed is set
cause: draws from a generator of its own
"""

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import Dataset

import samestep

rng = np.random.default_rng()


class Noisy(Dataset):
    def __init__(self):
        g = torch.Generator().manual_seed(0)
        self.x = torch.randn(50, 7, generator=g)
        self.y = self.x[:, :3].argmax(1)

    def __len__(self):
        return 50

    def __getitem__(self, i):
        return self.x[i] + torch.from_numpy(rng.normal(0, 0.2, 7)).float(), self.y[i]


torch.manual_seed(0)
samestep.init()
loader = samestep.loader(Noisy(), batch_size=10, shuffle=True, num_workers=0)
model = samestep.replicate(nn.Linear(7, 3))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(epoch, samestep.mean(loss.item()))
