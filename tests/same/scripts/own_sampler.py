"""A sampler that draws each sample from the script's stream when it is asked for it, between the draws of dropout."""

import random

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(29)
random.seed(29)
world = samestep.init()
data = TensorDataset(torch.randn(26, 4), torch.randn(26, 1))


class Anywhere:
    def __len__(self):
        return 26

    def __iter__(self):
        for _ in range(26):
            yield random.randrange(13) + int(torch.randint(13, ()))


train = samestep.loader(data, batch_size=7, sampler=Anywhere())
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 1))
model = samestep.replicate(model.to(world.device), same=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for _ in range(3):
    for x, y in train:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x * random.uniform(0.9, 1.1)), y)
        loss.backward()
        optimizer.step()
        print("loss", samestep.mean(loss.item()))
samestep.save("weights.pt", model.state_dict())
