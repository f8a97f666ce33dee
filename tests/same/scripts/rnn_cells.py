"""Recurrent cells in a Python loop, with dropout on the state, zoneout, and a hidden size equal to a share."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(30)
world = samestep.init()
train = samestep.loader(
    TensorDataset(torch.randn(37, 4, 3), torch.randint(0, 3, (37,))), batch_size=8, shuffle=True
)


class Cells(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.other, self.head = nn.LSTMCell(3, 4), nn.GRUCell(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        h = c = x.new_zeros(len(x), 4)
        g = torch.randn(x.size(0), 4) * 0.1
        for t in range(x.shape[1]):
            h, c = self.cell(x[:, t], (h, c))
            kept = torch.bernoulli(torch.full_like(h, 0.9))
            g = kept * self.other(F.dropout(h, 0.3, self.training), g) + (1 - kept) * g
        return self.head(F.dropout(g, 0.2, self.training))


model = samestep.replicate(Cells().to(world.device), same=True)
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
for epoch in range(3):
    torch.manual_seed(epoch)
    for x, y in train:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        print(epoch, samestep.mean(loss.item()))
samestep.save("weights.pt", model.state_dict())
