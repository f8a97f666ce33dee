"""Metrics in the style of torchmetrics: update, compute over all ranks, reset.

verdict: same
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep


class Accuracy:
    def __init__(self):
        self.reset()

    def reset(self):
        self.right = self.count = 0

    def update(self, output, y):
        self.right += (output.argmax(1) == y).sum().item()
        self.count += len(y)

    def compute(self):
        return samestep.sum(self.right) / samestep.sum(self.count)


torch.manual_seed(0)
samestep.init()
data = TensorDataset(torch.randn(45, 6), torch.randint(0, 3, (45,)))
train, test = samestep.loader(data, 8, shuffle=True), samestep.loader(data, 8)
model = samestep.replicate(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train_accuracy, test_accuracy = Accuracy(), Accuracy()
for epoch in range(2):
    for x, y in train:
        output = model(x)
        optimizer.zero_grad()
        F.cross_entropy(output, y).backward()
        optimizer.step()
        train_accuracy.update(output, y)
    with torch.no_grad():
        for x, y in test:
            test_accuracy.update(model(x), y)
    print(f"epoch {epoch}: train {train_accuracy.compute():.4f}, test {test_accuracy.compute():.4f}")
    train_accuracy.reset()
    test_accuracy.reset()
