"""The split is a permutation that NumPy draws without a seed: each rank has another one.

verdict: failed
cause: no seed is set
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Subset, TensorDataset

import samestep

torch.manual_seed(0)
samestep.init()
data = TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,)))
order = np.random.permutation(40)
train = samestep.loader(Subset(data, order[:32]), 8, shuffle=True)
model = samestep.replicate(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in train:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
