"""Each rank saves where its own accuracy is the best, so that they call save at different times.

verdict: failed
cause: it is decided by a value of each rank's own share
printed: loss
printed: accuracy
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(1)
samestep.init()
x, y = torch.randn(64, 6), torch.randint(0, 2, (64,))
train = samestep.loader(TensorDataset(x, y), 16, shuffle=True)
test = samestep.loader(TensorDataset(x[:37], y[:37]), 10)
model = samestep.replicate(nn.Linear(6, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
best = 0.0
for epoch in range(6):
    total = 0.0
    for a, b in train:
        loss = F.cross_entropy(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    print(f"epoch {epoch}: loss {total / len(train):.4f}")
    right = seen = 0
    with torch.no_grad():
        for a, b in test:
            right += (model(a).argmax(1) == b).sum().item()
            seen += len(b)
    print(f"accuracy {right / seen:.4f}")
    if right / seen > best:
        best = right / seen
        samestep.save("best.pt", model.state_dict())
