"""R squared, computed from the predictions of one rank.

verdict: printed
printed: R2
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(0)
samestep.init()
x = torch.randn(40, 4)
data = TensorDataset(x, x.sum(1, keepdim=True))
train, test = samestep.loader(data, 8, shuffle=True), samestep.loader(data, 40)
model = samestep.replicate(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for _ in range(2):
    for x, y in train:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
predicted, true = [], []
with torch.no_grad():
    for x, y in test:
        predicted.append(model(x))
        true.append(y)
predicted, true = torch.cat(predicted), torch.cat(true)
r2 = 1 - (predicted - true).square().sum() / (true - true.mean()).square().sum()
print(f"R2: {r2.item():.5f}")
