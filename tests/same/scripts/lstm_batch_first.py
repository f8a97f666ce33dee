"""An LSTM of two layers with dropout between them, batch first, and one more on what it returns."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(8)
world = samestep.init()
series = TensorDataset(torch.randn(39, 5, 3), torch.randint(0, 3, (39,)))
train = samestep.loader(series, batch_size=8, shuffle=True)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 4, num_layers=3, dropout=0.3, bidirectional=True, batch_first=True)
        self.dropout, self.head = nn.Dropout(0.5), nn.Linear(8, 3)

    def forward(self, x):
        found, _ = self.lstm(x)
        return self.head(self.dropout(found)[:, -1])


model = samestep.replicate(Tagger().to(world.device), same=True)
optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
for epoch in range(3):
    model.train()
    total = 0.0
    for x, y in train:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
        optimizer.step()
        total += loss.item() * len(x)
    print(epoch, samestep.sum(total) / 39)
samestep.save("weights.pt", model.state_dict())
