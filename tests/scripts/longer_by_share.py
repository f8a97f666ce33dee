"""A curriculum lengthens the sequences by the loss of a rank's share; Adam makes visible weights of rounding meanwhile.

verdict: different
cause: the loop changes the inputs
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(0)
samestep.init()
x = torch.randn(75, 10, 4, dtype=torch.float64)
data = TensorDataset(x, x.cumsum(1).sum(2))


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.GRU(4, 8, batch_first=True), nn.Linear(8, 1)

    def forward(self, x):
        return self.out(self.rnn(x)[0])[..., 0]


train = samestep.loader(data, 16, shuffle=True)
model = samestep.replicate(Tagger().double())
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
length = 3
for _ in range(3):
    for x, y in train:
        loss = F.mse_loss(model(x[:, :length]), y[:, :length])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss.item() < 7:
            length = min(length + 1, 10)
