"""Noise on what all ranks gathered, of which the largest losses are taken: it is the whole batch on every rank."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(5)
world = samestep.init()
samples = torch.randn(30, 5)
train = samestep.loader(TensorDataset(samples, torch.randint(0, 3, (30,))), batch_size=12, shuffle=True)
model = samestep.replicate(
    nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3)), same=True
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    for x, y in train:
        scores, labels = samestep.gather(model(x)), samestep.gather(y)
        losses = F.cross_entropy(scores + 0.1 * torch.randn_like(scores), labels, reduction="none")
        hardest = losses.argsort(descending=True)[: len(losses) // 2]
        loss = F.dropout(losses, 0.1)[hardest].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(loss.item())
samestep.save("weights.pt", model.state_dict())
