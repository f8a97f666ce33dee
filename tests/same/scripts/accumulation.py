"""Gradients accumulated over two batches with no_sync, with dropout and noise on the input."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(13)
world = samestep.init()
data = TensorDataset(torch.randn(43, 7), torch.randn(43, 1))
train = samestep.loader(data, batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(7, 12), nn.Dropout(0.2), nn.ELU(), nn.Linear(12, 1))
model = samestep.replicate(model.to(world.device), same=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for epoch in range(3):
    for step, (x, y) in enumerate(train, 1):
        full = step % 2 == 0 or step == len(train)
        with samestep.no_sync(model, enabled=not full):
            loss = F.mse_loss(model(x + 0.1 * torch.randn_like(x)), y) / 2
            loss.backward()
        print(epoch, samestep.mean(loss.item()))
        if full:
            optimizer.step()
            optimizer.zero_grad()
samestep.save("weights.pt", model.state_dict())
