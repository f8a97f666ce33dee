"""New data are drawn for each epoch, where each rank draws for itself.

verdict: failed
cause: leave a split by rank to samestep.loader; with --same, where all ranks draw alike, it does not fail
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(2)
model = samestep.replicate(nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
for _ in range(2):
    data = TensorDataset(torch.randn(44, 5), torch.randint(0, 3, (44,)))
    for x, y in samestep.loader(data, batch_size=10, shuffle=True):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
