"""The accuracy of one rank's half, nearly right: 0.69 instead of 0.71.

verdict: printed
printed: Accuracy
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(0)
samestep.init()
data = TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,)))
train, test = samestep.loader(data, 8, shuffle=True), samestep.loader(data, 16)
model = samestep.replicate(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    for x, y in train:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    correct = total = 0
    with torch.no_grad():
        for x, y in test:
            correct += (model(x).argmax(1) == y).sum().item()
            total += len(y)
    print("Accuracy: %.2f" % (correct / total))
