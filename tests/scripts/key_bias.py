"""Attention without dropout under Adam: the true gradient of its key bias is zero.

verdict: same
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(0)
samestep.init()
data = TensorDataset(torch.randn(40, 5, 8), torch.randint(0, 3, (40,)))
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
for _ in range(4):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
