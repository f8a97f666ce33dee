"""The weights are initialised again after an epoch, from each rank's own random numbers.

verdict: different
cause: initialise the model before the first batch
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep


def init_weights(m):
    if isinstance(m, nn.Linear):
        nn.init.xavier_uniform_(m.weight)
        nn.init.zeros_(m.bias)


torch.manual_seed(0)
device = samestep.init().device
loader = samestep.loader(TensorDataset(torch.randn(48, 6), torch.randint(0, 3, (48,))), 8, shuffle=True)
model = samestep.replicate(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    model.apply(init_weights)
