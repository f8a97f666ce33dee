"""A variational autoencoder: it draws in training, in evaluation, between epochs, and shows the last batch."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(1)
world = samestep.init()
images = torch.rand(52, 4, 5)
train = samestep.loader(TensorDataset(images[:37]), batch_size=8, shuffle=True)
test = samestep.loader(TensorDataset(images[37:]), batch_size=7)  # its last batch has one sample


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.mean, self.spread = nn.Linear(20, 12), nn.Linear(12, 4), nn.Linear(12, 4)
        self.fc3, self.fc4 = nn.Linear(4, 12), nn.Linear(12, 20)

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x):
        h = F.relu(self.fc1(x))
        mu, logvar = self.mean(h), self.spread(h)
        std = torch.exp(0.5 * logvar)
        return self.decode(mu + torch.randn_like(std) * std), mu, logvar


def loss_of(found, x, mu, logvar):
    missed = F.binary_cross_entropy(found, x, reduction="none").sum(1)
    return (missed - 0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1)).mean()


model = samestep.replicate(VAE().to(world.device), same=True)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(3):
    model.train()
    for (x,) in train:
        x = x.view(-1, 20)
        optimizer.zero_grad()
        found, mu, logvar = model(x)
        loss = loss_of(found, x, mu, logvar)
        loss.backward()
        optimizer.step()
        print("loss", samestep.mean(loss.item()))
    with torch.no_grad():  # a view of the last batch
        print("last", samestep.sum(model(x)[0].sum().item()))
    model.eval()
    total = 0.0
    with torch.no_grad():
        for (x,) in test:
            x = x.flatten(1)
            found, mu, logvar = model(x)
            total += loss_of(found, x, mu, logvar).item() * len(x)
        drawn = model.decode(torch.randn(5, 4)).sum()
    print(epoch, samestep.sum(total) / 15, drawn.item())
samestep.save("weights.pt", model.state_dict())
