"""Stochastic depth: whole branches dropped by sample, and layers dropped for the batch."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(16)
world = samestep.init()
data = TensorDataset(torch.randn(38, 4, 8), torch.randint(0, 3, (38,)))
train = samestep.loader(data, batch_size=8, shuffle=True)


def drop_path(x, chance, training):
    if not training:
        return x
    shape = (x.shape[0],) + (1,) * (x.dim() - 1)
    return x * x.new_empty(shape).bernoulli_(1 - chance) / (1 - chance)


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.channels = nn.Linear(4, 4), nn.Linear(8, 8)

    def forward(self, x):
        x = x + drop_path(self.tokens(x.transpose(1, 2)).transpose(1, 2).relu(), 0.3, self.training)
        mask = (0.8 + torch.rand(x.shape[0], 1, 1)).floor_() if self.training else 1.0
        return x + self.channels(x).tanh() * mask


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(Mixer() for _ in range(3)), nn.Linear(8, 3)

    def forward(self, x):
        for layer in self.layers:
            if not self.training or torch.rand([]) < 0.8:  # as LayerDrop
                x = layer(x)
        return self.head(x.mean(1))


model = samestep.replicate(Net().to(world.device), same=True, find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for epoch in range(3):
    for x, y in train:
        optimizer.zero_grad(set_to_none=False)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        print(epoch, samestep.mean(loss.item()))
samestep.save("weights.pt", model.state_dict())
