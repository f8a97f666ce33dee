"""An embedding with sparse gradients and SparseAdam.

verdict: same
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 6, sparse=True)

    def forward(self, x):
        return self.embed(x).mean(1)


torch.manual_seed(0)
samestep.init()
data = TensorDataset(torch.randint(0, 20, (32, 4)), torch.randn(32, 6))
loader = samestep.loader(data, 8, shuffle=True)
model = samestep.replicate(Bag())
optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.05)
for _ in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
