"""SimCLR over the pairs of a rank's share.

verdict: different
cause: it is computed from all samples of a rank's share together
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(0)
samestep.init()
loader = samestep.loader(TensorDataset(torch.randn(36, 6), torch.randn(36, 6)), 12, shuffle=True)
model = samestep.replicate(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for first, second in loader:
    a, b = F.normalize(model(first), dim=1), F.normalize(model(second), dim=1)
    loss = F.cross_entropy(a @ b.T / 0.5, torch.arange(len(a)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
