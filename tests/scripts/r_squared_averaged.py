"""The mean of the ranks' R squared: at 2 processes it differs by one in the last printed digit.

verdict: printed
printed: R2
sizes: 1,2
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(4)
samestep.init()
x = torch.randn(200, 8)
y = x[:, :4].sum(1, keepdim=True) + 0.5 * torch.randn(200, 1)
train = samestep.loader(TensorDataset(x[:160], y[:160]), 16, shuffle=True)
test = samestep.loader(TensorDataset(x[160:], y[160:]), 10)
model = samestep.replicate(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
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
print(f"R2 {samestep.mean(r2).item():.3f}")
