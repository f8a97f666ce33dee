"""Graphs of a batch as one tensor: masked mean over nodes, then a loss over graphs.

verdict: same
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, adjacency, nodes, mask):
        hidden = torch.tanh(adjacency @ self.first(nodes)) * mask[..., None]
        return self.second(hidden.sum(1) / mask.sum(1, keepdim=True))


torch.manual_seed(0)
samestep.init()
mask = (torch.arange(6) < torch.randint(2, 7, (30, 1))).float()
data = TensorDataset(torch.rand(30, 6, 6), torch.randn(30, 6, 4), mask, torch.randint(0, 2, (30,)))
model = samestep.replicate(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for adjacency, nodes, mask, y in samestep.loader(data, 6, shuffle=True):
    optimizer.zero_grad()
    F.cross_entropy(model(adjacency, nodes, mask), y).backward()
    optimizer.step()
