"""Steps from an iterator that begins before there is a model, and begins anew where it ends."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(29)
samestep.init()
train = samestep.loader(TensorDataset(torch.randn(26, 6), torch.randn(26, 1)), batch_size=12, shuffle=True)
batches = iter(train)
net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1))
model = samestep.replicate(net, same=True)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range(9):
    try:
        x, y = next(batches)
    except StopIteration:
        batches = iter(train)
        x, y = next(batches)
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(samestep.mean(loss.item()))
samestep.save("weights.pt", model.state_dict())
