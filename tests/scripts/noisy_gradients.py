"""Noise on gradients; one dimension of a weight has the size of a rank's share.

verdict: different
cause: each rank changes the weights by random numbers of its own
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(0)
samestep.init()
x = torch.randn(40, 8)
y = x[:, :4].argmax(1)
loader = samestep.loader(TensorDataset(x, y), batch_size=8, shuffle=True)
model = samestep.replicate(nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Dropout(0.1), nn.Linear(4, 4)))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    for a, b in loader:
        loss = F.cross_entropy(model(a), b)
        opt.zero_grad()
        loss.backward()
        for p in model.parameters():
            p.grad.add_(torch.randn_like(p), alpha=0.01)
        opt.step()
    print(epoch, samestep.mean(loss.item()))
samestep.save("n.pt", model.state_dict())
