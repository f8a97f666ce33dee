"""update_bn takes the statistics of a copy that is replicated too: no evaluation in training mode.

verdict: same
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(21)
samestep.init()
data = TensorDataset(torch.randn(50, 6), torch.randint(0, 3, (50,)))
train = samestep.loader(data, 10, shuffle=True)
net = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.ReLU(), nn.Linear(10, 3))
model, averaged = samestep.replicate(net, sync_batchnorm=True), AveragedModel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    for x, y in train:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    averaged.update_parameters(net)
averaged = samestep.replicate(averaged, sync_batchnorm=True)
update_bn(samestep.loader(data, 10), averaged)
averaged.eval()
right = 0
with torch.no_grad():
    for x, y in samestep.loader(data, 25):
        right += (averaged(x).argmax(1) == y).sum().item()
print(f"accuracy of the average {samestep.sum(right) / len(data):.4f}")
