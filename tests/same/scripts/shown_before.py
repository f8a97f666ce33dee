"""Noise that is drawn before samestep is there, and that the loop shows: it has as many rows as a share by chance."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(9)
shown = torch.randn(6, 4)
train = samestep.loader(TensorDataset(torch.randn(41, 3)), batch_size=12, shuffle=True)
net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
model = samestep.replicate(net, same=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    for (x,) in train:
        loss = (model(torch.randn(len(x), 4)) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            print(samestep.mean(loss.item()), model(shown).sum().item())
samestep.save("weights.pt", model.state_dict())
