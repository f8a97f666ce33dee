"""Each rank evaluates on all samples, and the counts are summed.

verdict: printed
printed: times that of 1 process
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import samestep

torch.manual_seed(0)
samestep.init()
x = torch.randn(80, 6)
data = TensorDataset(x, (x[:, 0] > 0).long())
train_loader = samestep.loader(data, 10, shuffle=True)
val_loader = DataLoader(data, 20)
model = samestep.replicate(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    model.train()
    for xb, yb in train_loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(xb), yb).backward()
        optimizer.step()
    model.eval()
    correct = 0
    for xb, yb in val_loader:
        with torch.no_grad():
            correct += (model(xb).argmax(1) == yb).sum().item()
    print(f"epoch {epoch} val acc {samestep.sum(correct) / len(data):.3f}")
