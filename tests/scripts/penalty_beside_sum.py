"""A summed loss with loss="sum", and a penalty on the weights, which counts once.

verdict: same
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(0)
samestep.init()
data = TensorDataset(torch.randn(43, 6), torch.randint(0, 3, (43,)))
train = samestep.loader(data, 8, shuffle=True)
model = samestep.replicate(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), loss="sum")
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(2):
    total = 0.0
    for x, y in train:
        loss = F.cross_entropy(model(x), y, reduction="sum")
        total += loss.item()
        loss += 0.1 * sum(parameter.square().sum() for parameter in model.parameters())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {samestep.sum(total) / len(data):.4f}")
