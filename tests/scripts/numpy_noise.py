"""Augmentation in the loop draws from NumPy's stream, once for each row of the share.

verdict: with_same
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

np.random.seed(0)
torch.manual_seed(0)
samestep.init()
loader = samestep.loader(TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,))), 8, shuffle=True)
model = samestep.replicate(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in loader:
    flip = torch.from_numpy(np.random.rand(len(x)) < 0.5)
    x = torch.where(flip[:, None], x.flip(1), x)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
