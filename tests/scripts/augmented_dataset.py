"""Augmentation drawn in the data set, for each sample.

verdict: same
"""

import torch
import torch.nn.functional as F
from torch import nn

import samestep


class Augmented(torch.utils.data.Dataset):
    def __init__(self):
        self.x, self.y = torch.randn(40, 6), torch.randint(0, 3, (40,))

    def __len__(self):
        return 40

    def __getitem__(self, at):
        x = self.x[at] + 0.1 * torch.randn(6)
        return (x.flip(0) if torch.rand(1) < 0.5 else x), self.y[at]


torch.manual_seed(0)
samestep.init()
loader = samestep.loader(Augmented(), 8, shuffle=True, num_workers=0)
model = samestep.replicate(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
