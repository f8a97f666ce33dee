"""Every few steps the model is evaluated on all ranks, inside the loop over batches.

verdict: same
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
for step, (x, y) in enumerate(train):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    if step % 2 == 0:
        with torch.no_grad():
            right = sum((model(a).argmax(1) == b).sum().item() for a, b in test)
        print(f"step {step}: {samestep.sum(right)} of {len(data)}")
