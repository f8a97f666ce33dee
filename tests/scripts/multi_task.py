"""Two tasks with a backward pass each on one graph, before one step.

verdict: same
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 1)

    def forward(self, x):
        hidden = torch.tanh(self.body(x))
        return self.first(hidden), self.second(hidden)


torch.manual_seed(0)
samestep.init()
data = TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,)), torch.randn(40, 1))
loader = samestep.loader(data, 8, shuffle=True)
model = samestep.replicate(Net(), find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    for x, label, value in loader:
        optimizer.zero_grad()
        first, _ = model(x)
        F.cross_entropy(first, label).backward()
        _, second = model(x)
        (0.3 * F.mse_loss(second, value)).backward()
        optimizer.step()
