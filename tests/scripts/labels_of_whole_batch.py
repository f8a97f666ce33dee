"""The same with labels for the whole batch, of which a rank has only a share.

verdict: failed
cause: if 12 stands for the size of a batch here, write x.size(0) of the input
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
labels = torch.arange(12)
for first, second in loader:
    loss = F.cross_entropy(model(first) @ model(second).T, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
