"""Forward normalizes over the batch, without BatchNorm.

verdict: different
cause: the model computes over all samples of its input together
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        hidden = self.first(x)
        return self.second(torch.tanh((hidden - hidden.mean(0)) / (hidden.std(0) + 1e-5)))


torch.manual_seed(0)
samestep.init()
loader = samestep.loader(TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,))), 8, shuffle=True)
model = samestep.replicate(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in loader:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
