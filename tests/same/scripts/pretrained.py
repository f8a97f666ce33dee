"""An encoder that is trained in an autoencoder, then below a classifier, then below two heads at once."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(21)
samestep.init()
# the last batch has one sample, so that some ranks have none
train = samestep.loader(
    TensorDataset(torch.randn(37, 6), torch.randint(0, 3, (37,))), batch_size=12, shuffle=True
)
encoder = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2))


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.classes, self.inputs = encoder, nn.Linear(8, 3), nn.Linear(8, 6)

    def forward(self, x):
        z = self.encoder(x)
        return self.classes(z), self.inputs(z)


def trained(model, loss_of):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in train:
        loss = loss_of(model(x), x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(samestep.mean(loss.item()))


model = samestep.replicate(nn.Sequential(encoder, nn.Linear(8, 6)), same=True)
trained(model, lambda made, x, y: F.mse_loss(made, x))
del model
model = samestep.replicate(nn.Sequential(encoder, nn.Linear(8, 3)), same=True)
trained(model, lambda made, x, y: F.cross_entropy(made, y))
del model
model = samestep.replicate(Heads(), same=True)
trained(model, lambda made, x, y: F.cross_entropy(made[0], y) + F.mse_loss(made[1], x))
samestep.save("weights.pt", model.state_dict())
