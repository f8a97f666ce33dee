"""A graph network over all nodes with a sparse adjacency; the loader shares the labelled nodes.

verdict: same
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, adjacency, features):
        hidden = torch.tanh(torch.sparse.mm(adjacency, self.first(features)))
        return self.second(torch.sparse.mm(adjacency, hidden))


torch.manual_seed(0)
samestep.init()
features, labels = torch.randn(30, 5), torch.randint(0, 3, (30,))
edges = torch.randint(0, 30, (2, 90))
adjacency = torch.sparse_coo_tensor(edges, torch.full((90,), 0.3), (30, 30)).coalesce()
loader = samestep.loader(TensorDataset(torch.arange(24)), 8, shuffle=True)
model = samestep.replicate(GCN())
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
for _ in range(2):
    for (nodes,) in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(adjacency, features)[nodes], labels[nodes]).backward()
        optimizer.step()
