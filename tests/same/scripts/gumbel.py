"""A discrete autoencoder by Gumbel softmax, whose temperature falls; evaluation draws too."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(17)
world = samestep.init()
data = torch.rand(53, 10)
train = samestep.loader(TensorDataset(data[:37]), batch_size=8, shuffle=True)
test = samestep.loader(TensorDataset(data[37:]), batch_size=5)


class Discrete(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(10, 12), nn.Linear(12, 10)

    def forward(self, x, temperature, hard=False):
        logits = self.encode(x).view(-1, 4, 3)
        code = F.gumbel_softmax(logits, temperature, hard=hard)
        return self.decode(code.flatten(1)).sigmoid(), logits.log_softmax(2).mean((1, 2))


model = samestep.replicate(Discrete().to(world.device), same=True)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(3):
    for (x,) in train:
        optimizer.zero_grad()
        found, prior = model(x, 1 / (epoch + 1))
        loss = F.binary_cross_entropy(found, x) - 0.01 * prior.mean()
        loss.backward()
        optimizer.step()
        print("loss", samestep.mean(loss.item()))
    with torch.no_grad():
        missed = sum(F.mse_loss(model(x, 0.5, hard=True)[0], x, reduction="sum").item() for (x,) in test)
    print(epoch, samestep.sum(missed))
samestep.save("weights.pt", model.state_dict())
