"""Draws whose chances, means and spreads are tensors: bernoulli, normal, multinomial with and without replacement."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
samestep.init()
train = samestep.loader(TensorDataset(torch.rand(23, 4)), batch_size=6, shuffle=True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        h = self.fc(x)
        mean, spread = h.detach(), h.detach().abs() + 0.1
        h = h + torch.normal(mean, 0.1) + torch.normal(0.0, spread) + torch.normal(mean, spread)
        h = h * torch.bernoulli(torch.sigmoid(h.detach()))
        h = h * torch.empty_like(h).bernoulli_(torch.sigmoid(h.detach()))
        i = torch.multinomial(torch.softmax(h.detach(), 1), 2)
        j = torch.multinomial(torch.softmax(h.detach(), 1), 5, replacement=True)
        k = torch.multinomial(torch.ones(5), 2)
        return h.gather(1, i).sum(1) + j.sum(1) + k.sum() + self.fc(x).sum(1)


model = samestep.replicate(Net(), same=True)
opt = torch.optim.SGD(model.parameters(), 0.01)
for _ in range(3):
    for (x,) in train:
        loss = model(x).mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        w = torch.bernoulli(torch.full((len(x),), 0.5))
        print(samestep.mean(loss.item()), samestep.sum(w.sum().item()))
samestep.save("weights.pt", model.state_dict())
