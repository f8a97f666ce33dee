"""A split drawn from a generator with a seed; validation loss of all ranks stops the training.

verdict: same
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset, random_split

import samestep

torch.manual_seed(0)
samestep.init()
data = TensorDataset(torch.randn(50, 6), torch.randint(0, 3, (50,)))
train_set, val_set = random_split(data, [40, 10], torch.Generator().manual_seed(42))
train, val = samestep.loader(train_set, 8, shuffle=True), samestep.loader(val_set, 5)
model = samestep.replicate(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
best, patience = float("inf"), 0
for epoch in range(8):
    for x, y in train:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        loss = sum(F.cross_entropy(model(x), y, reduction="sum").item() for x, y in val)
    model.train()
    loss = samestep.sum(loss) / len(val_set)
    print(f"epoch {epoch} val {loss:.3f}")
    patience = 0 if loss < best else patience + 1
    best = min(best, loss)
    if patience == 2:
        break
