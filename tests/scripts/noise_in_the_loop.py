"""Noise drawn in the loop for the rows of the batch, as in a denoising autoencoder.

verdict: with_same
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(0)
samestep.init()
loader = samestep.loader(TensorDataset(torch.rand(40, 6)), 8, shuffle=True)
model = samestep.replicate(nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 6)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range(2):
    for (x,) in loader:
        loss = F.mse_loss(model(x + 0.2 * torch.randn_like(x)), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
