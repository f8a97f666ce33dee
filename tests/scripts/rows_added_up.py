"""The loss adds up the rows of the share in a loop, and divides by the size of the batch.

verdict: different
cause: the loss is a sum over each rank's samples
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(0)
samestep.init()
data = TensorDataset(torch.randn(43, 6), torch.randint(0, 3, (43,)))
train = samestep.loader(data, 8, shuffle=True, drop_last=True)
model = samestep.replicate(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    for x, y in train:
        log_p = model(x).log_softmax(1)
        loss = -sum(log_p[i, label] for i, label in enumerate(y.tolist())) / 8
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
