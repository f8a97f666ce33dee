"""The loop subtracts the batch's mean, which is that of the share, and prints the share's accuracy.

verdict: different
cause: the loop changes the inputs
printed: accuracy
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(0)
samestep.init()
data = TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,)))
loader = samestep.loader(data, 8, shuffle=True)
model = samestep.replicate(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    correct = 0
    for x, y in loader:
        output = model((x - x.mean(0)) / x.std())
        optimizer.zero_grad()
        F.cross_entropy(output, y).backward()
        optimizer.step()
        correct += (output.argmax(1) == y).sum().item()
    print(f"accuracy {correct / len(data):.3f}")
