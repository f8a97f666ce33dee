"""Some rows of a gathered batch, as many as a share has by chance, with dropout and noise on them."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
samestep.init()
data = TensorDataset(torch.randn(38, 6), torch.randint(0, 3, (38,)))
train = samestep.loader(data, batch_size=12, shuffle=True)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 4))
model = samestep.replicate(model, same=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    for x, y in train:
        z, labels = samestep.gather(model(x)), samestep.gather(y)
        count = len(z)
        half, first = z[: count // 2], F.dropout(z[labels == 0], 0.2)
        noisy = F.dropout(half, 0.5) + torch.randn(count // 2, 4)
        order = torch.randperm(count)
        pairs = F.dropout(z, 0.3) @ z[order].t() + 0.1 * torch.rand(count, count)
        loss = (
            F.cross_entropy(pairs, torch.argsort(order)) + noisy.square().mean() + first.square().sum() / 12
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(loss.item())
samestep.save("weights.pt", model.state_dict())
