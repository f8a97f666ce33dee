"""The gradient of an absolute error cancels out where residuals have both signs; Adam makes full steps of its rounding.

verdict: same
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(5)
samestep.init()
x = torch.randn(60, 4)
y = x[:, :1] * 0.5 + torch.randn(60, 1)
train = samestep.loader(TensorDataset(x, y), 10, shuffle=True)
test = samestep.loader(TensorDataset(x, y), 7)
model = samestep.replicate(nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
for epoch in range(3):
    for a, b in train:
        optimizer.zero_grad()
        F.l1_loss(model(a), b).backward()
        optimizer.step()
    with torch.no_grad():
        error = sum(F.l1_loss(model(a), b, reduction="sum").item() for a, b in test)
    print(f"epoch {epoch}: mean absolute error {samestep.sum(error) / len(x):.6f}")
