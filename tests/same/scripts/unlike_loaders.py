"""Two loaders in a zip whose last batches differ in size, each through the model with dropout and BatchNorm."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(5)
world = samestep.init()

first = TensorDataset(torch.randn(31, 6), torch.randn(31, 1))
second = TensorDataset(torch.randn(22, 6), torch.randn(22, 1))
a = samestep.loader(first, batch_size=6, shuffle=True)
b = samestep.loader(second, batch_size=6, shuffle=True)


class Net(nn.Module):
    def __init__(self, wide=6):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(wide, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, x):
        return self.second(F.dropout(F.relu(self.norm(self.first(x))), 0.3, self.training))


model = samestep.replicate(Net().to(world.device), same=True)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range(3):
    for (x, y), (u, v) in zip(a, b, strict=False):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y) + 0.5 * F.mse_loss(model(u), v + 0.1 * torch.randn_like(v))
        loss.backward()
        optimizer.step()

samestep.save("weights.pt", model.state_dict())
