"""SimCLR with the outputs of all ranks gathered.

verdict: same
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(0)
samestep.init()
data = TensorDataset(torch.randn(36, 6), torch.randn(36, 6))
model = samestep.replicate(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    for first, second in samestep.loader(data, 12, shuffle=True, drop_last=True):
        a = F.normalize(samestep.gather(model(first)), dim=1)
        b = F.normalize(samestep.gather(model(second)), dim=1)
        logits = a @ b.T / 0.5
        labels = torch.arange(len(logits))
        loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
