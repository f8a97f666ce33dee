"""Only the largest losses of the batch are trained on: those of the share.

verdict: different
cause: the hardest terms
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(0)
samestep.init()
loader = samestep.loader(TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,))), 8, shuffle=True)
model = samestep.replicate(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in loader:
    losses = F.cross_entropy(model(x), y, reduction="none")
    loss = losses.topk(max(1, len(losses) // 4))[0].mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
