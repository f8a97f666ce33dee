"""samestep.steps: each step has four microbatches, shared among the ranks.

verdict: same
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(0)
samestep.init()
train = samestep.steps(
    TensorDataset(torch.randn(48, 6), torch.randint(0, 3, (48,))), batch_size=16, microbatch=4
)
model = samestep.replicate(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    for step in train:
        for x, y in step:
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
