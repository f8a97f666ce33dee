"""An exponential moving average of the weights, evaluated and saved.

verdict: same
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(0)
samestep.init()
data = TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,)))
train, test = samestep.loader(data, 8, shuffle=True), samestep.loader(data, 10)
net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
ema = copy.deepcopy(net).requires_grad_(False)
model = samestep.replicate(net)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(2):
    for x, y in train:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            for mean, now in zip(ema.parameters(), model.parameters()):
                mean.lerp_(now, 0.1)
    right = sum((ema(x).argmax(1) == y).sum().item() for x, y in test)
    print(f"epoch {epoch}: {samestep.sum(right) / len(data):.3f}")
samestep.save("ema.pt", ema.state_dict())
