"""The slope of the model at each sample is printed, by torch.func.

verdict: same
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import jacrev, vmap
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(0)
samestep.init()
data = TensorDataset(torch.randn(40, 3), torch.randn(40, 1))
model = samestep.replicate(nn.Sequential(nn.Linear(3, 12), nn.Tanh(), nn.Linear(12, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for x, y in samestep.loader(data, 8, shuffle=True):
    slopes = vmap(jacrev(lambda row: model(row)))(x)
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    print(f"slope {samestep.mean(slopes.square().sum((1, 2)).mean()).item():.4f}")
