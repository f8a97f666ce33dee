"""Noise on the weights, one draw for all ranks, and on what they make; layers are as wide as a share of the batch."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(20)
world = samestep.init()
train = samestep.loader(TensorDataset(torch.randn(38, 4), torch.randn(38, 1)), batch_size=8, shuffle=True)


class Noisy(nn.Module):
    """A Bayesian layer: its weights are drawn anew in each call."""

    def __init__(self, given, made):
        super().__init__()
        self.mean, self.log_spread = (
            nn.Parameter(torch.randn(made, given) / 2),
            nn.Parameter(torch.ones(made, given) * -3),
        )
        self.bias = nn.Parameter(torch.zeros(made))

    def forward(self, x):
        weight = self.mean + torch.randn_like(self.mean) * self.log_spread.exp()
        made = F.linear(
            x, F.dropout(weight, 0.1, self.training), self.bias + 0.1 * torch.randn_like(self.bias)
        )
        return made + 0.01 * (torch.empty(made.size()).normal_(0, 1) + torch.randn(made.shape))


model = nn.Sequential(Noisy(4, 8), nn.Tanh(), nn.Dropout(0.2), Noisy(8, 4), nn.Tanh(), Noisy(4, 1))
model = samestep.replicate(model.to(world.device), same=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for epoch in range(3):
    for x, y in train:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        print(epoch, samestep.mean(loss.item()))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape))
samestep.save("weights.pt", model.state_dict())
