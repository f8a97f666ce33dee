"""A metric adds up over the processes by itself, and the script adds its count again.

verdict: printed
printed: times that of 1 process
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep


class Right:
    def __init__(self):
        self.count = 0

    def compute(self):
        total = torch.tensor(self.count)
        if dist.is_initialized():
            dist.all_reduce(total)
        self.count = int(total)
        return self.count


torch.manual_seed(0)
samestep.init()
data = TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,)))
train, test = samestep.loader(data, 8, shuffle=True), samestep.loader(data, 16)
model = samestep.replicate(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    for x, y in train:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    right = Right()
    with torch.no_grad():
        for x, y in test:
            right.count += (model(x).argmax(1) == y).sum().item()
    print(
        f"epoch {epoch}: accuracy {right.compute() / len(data):.4f}, {samestep.sum(right.count)} of {len(data)}"
    )
