"""The largest error over the validation set is the largest of one rank's share.

verdict: printed
printed: worst error
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(0)
samestep.init()
data = TensorDataset(torch.randn(40, 6), torch.randn(40, 1))
train, test = samestep.loader(data, 8, shuffle=True), samestep.loader(data, 8)
model = samestep.replicate(nn.Linear(6, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    for x, y in train:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    with torch.no_grad():
        worst = max((model(x) - y).abs().max().item() for x, y in test)
    print(f"worst error {worst:.3f}")
