"""The last batch has one sample, in training and in evaluation, and everything draws."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(23)
world = samestep.init()
data = TensorDataset(torch.randn(22, 5), torch.randn(22, 1))
train = samestep.loader(data, batch_size=7, shuffle=True)
test = samestep.loader(data, batch_size=7)
model = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.3), nn.Tanh(), nn.Linear(7, 1))
model = samestep.replicate(model.to(world.device), same=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    for x, y in train:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x) + 0.1 * torch.randn(x.shape[0], 1), y)
        loss.backward()
        optimizer.step()
        print("loss", samestep.mean(loss.item()))
    with torch.no_grad():
        missed = 0.0
        for x, y in test:
            missed += F.mse_loss(model(x) + torch.randn_like(y), y, reduction="sum").item()
    print(epoch, samestep.sum(missed), torch.rand(3).tolist())
samestep.save("weights.pt", model.state_dict())
