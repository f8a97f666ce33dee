"""A class token before every sequence, whose length is a share's size; sequence first, noise and a mask by number."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(5)
world = samestep.init()

data = TensorDataset(torch.randn(26, 2, 6), torch.randn(26, 1))
train = samestep.loader(data, batch_size=6, shuffle=True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.2)
        self.cls = nn.Parameter(torch.randn(1, 1, 6))
        self.head = nn.Linear(6, 1)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x):
        x = torch.cat([self.cls.expand(len(x), 1, 6), x], 1).transpose(0, 1)
        x = self.enc(x)
        keep = torch.bernoulli(torch.full((x.shape[1], 1), 0.8)) if self.training else 1.0
        x = x + 0.01 * torch.randn_like(x)
        flat = F.dropout(x.reshape(-1, 6), 0.2, self.training).reshape(x.shape)
        return self.head(self.norm(flat.mean(0) * keep))


model = samestep.replicate(Net().to(world.device), same=True)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range(3):
    for x, y in train:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        print("loss", float(samestep.mean(loss.item())))

samestep.save("weights.pt", model.state_dict())
