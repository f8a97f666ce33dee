"""Segments recomputed in backward, with dropout and noise inside; one by each of torch's two ways."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(14)
world = samestep.init()
train = samestep.loader(
    TensorDataset(torch.randn(37, 4, 8), torch.randint(0, 3, (37,))), batch_size=8, shuffle=True
)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.3))

    def forward(self, x):
        x = x + self.attention(x, x, x, need_weights=True)[0]
        return x + self.mlp(x) + 0.01 * torch.randn_like(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = Block(), Block(), nn.Linear(8, 3)

    def forward(self, x):
        x = checkpoint(self.first, x, use_reentrant=False)
        x = checkpoint(lambda x: self.second(x), x, use_reentrant=False)
        return self.head(x.mean(1))


model = samestep.replicate(Net().to(world.device), same=True)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(3):
    for x, y in train:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        print(epoch, samestep.mean(loss.item()))
samestep.save("weights.pt", model.state_dict())
