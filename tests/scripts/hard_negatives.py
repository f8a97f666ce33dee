"""A triplet loss with the hardest negative of the batch, which is that of the share.

verdict: different
cause: share
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(0)
samestep.init()
loader = samestep.loader(TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,))), 10, shuffle=True)
model = samestep.replicate(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in loader:
    out = model(x)
    apart = torch.cdist(out, out)
    same = y[:, None] == y
    furthest = (apart * same).max(1)[0]
    nearest = (apart + 1e3 * same).min(1)[0]
    loss = F.relu(furthest - nearest + 0.5).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
