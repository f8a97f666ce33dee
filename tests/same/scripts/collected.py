"""Batches collected in a list, and gone through again after the loader has ended."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(5)
world = samestep.init()

data = TensorDataset(torch.randn(17, 6), torch.randn(17, 1))
train = samestep.loader(data, batch_size=6, shuffle=True)


class Net(nn.Module):
    def __init__(self, wide=6):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(wide, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, x):
        return self.second(F.dropout(F.relu(self.norm(self.first(x))), 0.3, self.training))


model = samestep.replicate(Net().to(world.device), same=True)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)


def train_on(x, y):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    print("loss", float(samestep.mean(loss.item())))


batches = list(train)
for _ in range(2):
    for x, y in batches:
        train_on(x, y)

samestep.save("weights.pt", model.state_dict())
