"""Each rank makes its data from $RANK, as if it read a shard of its own.

verdict: different
cause: RANK
"""

import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

samestep.init()
shard = int(os.environ.get("RANK", 0))
x = torch.randn(40, 6, generator=torch.Generator().manual_seed(shard))
y = torch.arange(40) % 3
torch.manual_seed(0)
loader = samestep.loader(TensorDataset(x, y), 8, shuffle=True)
model = samestep.replicate(nn.Linear(6, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in loader:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
