"""Mixup: a permutation of the batch chooses the partners, and BatchNorm sees what comes of it.

verdict: different
cause: randperm (permuted_pairs.py
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(0)
np.random.seed(0)
samestep.init()
x = torch.randn(46, 6)
loader = samestep.loader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=12, shuffle=True)
model = samestep.replicate(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for _ in range(2):
    for x, y in loader:
        part, partner = np.random.beta(1.0, 1.0), torch.randperm(x.size(0))
        output = model(part * x + (1 - part) * x[partner])
        loss = part * F.cross_entropy(output, y) + (1 - part) * F.cross_entropy(output, y[partner])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
