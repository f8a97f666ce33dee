"""A best model that is chosen by one rank's accuracy: by chance, ranks come apart only with --same.

verdict: different
cause: it is decided by a value of each rank's own share
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(2)
samestep.init()
X, Y = torch.rand(105, 8), torch.randint(0, 5, (105,))
train = samestep.loader(TensorDataset(X[:70], Y[:70]), batch_size=16, shuffle=True)
test = samestep.loader(TensorDataset(X[70:], Y[70:]), batch_size=10)
net = samestep.replicate(
    nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 5))
)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
best = 0.0
for _ in range(3):
    net.train()
    for x, y in train:
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    net.eval()
    correct = total = 0
    with torch.no_grad():
        for x, y in test:
            correct += (net(x).argmax(1) == y).sum().item()
            total += len(y)
    if correct / total > best:
        best = correct / total
        samestep.save("best.pt", net.state_dict())
