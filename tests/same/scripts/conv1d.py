"""Convolutions over sequences with spatial dropout, sequences first in the attention, a loader's own generator."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(32)
world = samestep.init()
data = TensorDataset(torch.randn(37, 4, 6), torch.randint(0, 3, (37,)))
order = torch.utils.data.RandomSampler(data, generator=torch.Generator().manual_seed(3))
train = samestep.loader(data, batch_size=8, sampler=order)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4), nn.Dropout1d(0.3)
        self.attention, self.head = nn.MultiheadAttention(4, 4, dropout=0.2), nn.Linear(4, 3)

    def forward(self, x):
        x = self.drop(F.relu(self.norm(self.conv(x)))).permute(2, 0, 1)
        x, weights = self.attention(x, x, x)
        x = F.dropout(x, 0.1, self.training)
        return self.head(x.mean(0)) + weights.mean((1, 2))[:, None] * 0


model = samestep.replicate(Net().to(world.device), same=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    for x, y in train:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        print(epoch, samestep.mean(loss.item()))
samestep.save("weights.pt", model.state_dict())
