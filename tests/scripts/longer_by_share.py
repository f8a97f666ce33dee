"""A curriculum lengthens the sequences by the loss of a rank's share; under Adam a key bias is all noise meanwhile.

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
data = TensorDataset(torch.randn(40, 9, 8), torch.randint(0, 3, (40,)))
loader = samestep.loader(data, 8, shuffle=True)
encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.encoder(x).mean(1))


model = samestep.replicate(Classifier())
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
length = 3
for _ in range(2):
    for x, y in loader:
        loss = F.cross_entropy(model(x[:, :length]), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        length = min(9, length + (loss.item() < 1.1))
