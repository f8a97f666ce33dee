"""A discriminator gets real and generated rows in one call; a generator shows fixed noise, as many rows as a share has.

The prior's mean is as long as a share too, and a recurrent layer goes on from the state of its last call.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(3)
samestep.init()
train = samestep.loader(TensorDataset(torch.randn(45, 2)), batch_size=12, shuffle=True)
fixed, prior = torch.randn(6, 3), torch.distributions.Normal(torch.zeros(4), torch.ones(4))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.LSTM(2, 6, 2, dropout=0.2, batch_first=True), nn.Linear(6, 2)

    def forward(self, x, state):
        output, state = self.layers(x, state)
        return self.head(output[:, -1]), state


made = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))
judged = nn.Sequential(nn.Linear(2, 12), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(12, 1))
generator, discriminator, told = (samestep.replicate(net, same=True) for net in (made, judged, Recurrent()))
of_generator = torch.optim.Adam([*generator.parameters(), *told.parameters()], lr=0.01)
of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=0.01)
for _ in range(3):
    for (x,) in train:
        n, state = len(x), None
        fake = generator(torch.randn(n, 3))
        output = discriminator(torch.cat([x, fake.detach()]))
        loss = F.binary_cross_entropy_with_logits(output, torch.cat([torch.ones(n, 1), torch.zeros(n, 1)]))
        of_discriminator.zero_grad()
        loss.backward()
        of_discriminator.step()
        other = F.softplus(-discriminator(fake)).mean()
        of_generator.zero_grad()
        other.backward()
        for _ in range(2):
            guess, state = told(x.unsqueeze(1), state)
            state = [part.detach() for part in state]
            F.mse_loss(guess, x).backward()
        of_generator.step()
        with torch.no_grad():
            shown = generator(fixed).sum().item() + prior.sample().sum().item()
        print(samestep.mean(loss.item()), samestep.mean(other.item()), shown)
samestep.save(
    "weights.pt",
    {**generator.state_dict(), "told": told.head.weight.detach(), "judged": judged[0].weight.detach()},
)
