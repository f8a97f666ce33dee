"""A stream that draws its own order and noise, from torch's, Python's and NumPy's streams, beside dropout."""

import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(41)
random.seed(42)
np.random.seed(43)
world = samestep.init()


class Rows(IterableDataset):
    def __init__(self, rows, labels):
        self.rows, self.labels = rows, labels

    def __iter__(self):
        held, shift = [], np.random.rand()
        for at in torch.randperm(len(self.rows)).tolist():
            held.append((self.rows[at] + shift + 0.1 * torch.randn(5), self.labels[at]))
            if len(held) == 4:
                yield held.pop(random.randrange(4))
        yield from held


data = Rows(torch.randn(25, 5), torch.randint(0, 3, (25,)))
train = samestep.loader(data, batch_size=6)
model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.3), nn.Linear(8, 3))
model = samestep.replicate(model.to(world.device), same=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    for x, y in train:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x + np.random.rand()), y)
        loss.backward()
        optimizer.step()
        print(epoch, samestep.mean(loss.item()))
samestep.save("weights.pt", model.state_dict())
