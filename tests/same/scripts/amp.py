"""Autocast to bfloat16 with dropout, in float32: the tolerance is that of bfloat16."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(12)
world = samestep.init()
data = TensorDataset(torch.randn(37, 10), torch.randint(0, 3, (37,)))
train = samestep.loader(data, batch_size=8, shuffle=True)
model = nn.Sequential(
    nn.Linear(10, 16), nn.ReLU(), nn.Dropout(0.4), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)
)
model = samestep.replicate(model.to(world.device), same=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for epoch in range(3):
    for x, y in train:
        optimizer.zero_grad()
        with torch.autocast(world.device.type, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x).float(), y)
        loss.backward()
        optimizer.step()
        print(epoch, samestep.mean(loss.item()))
samestep.save("weights.pt", model.state_dict())
