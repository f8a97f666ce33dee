"""Words that a share decides: a class, a flag, minus infinity, and a line that is only printed for good numbers.

verdict: printed
printed: has the class
printed: is above its mean
printed: is finite
printed: prints `nothing` instead of `a good start`
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(0)
samestep.init()
x, y = torch.randn(48, 6), torch.arange(48) // 4 % 3
train = samestep.loader(TensorDataset(x, y), 12, shuffle=True)
test = samestep.loader(TensorDataset(x, y), 16)
model = samestep.replicate(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
threshold = -3.0
names = ["ant", "bee"]
for epoch in range(4):
    for a, b in train:
        optimizer.zero_grad()
        F.cross_entropy(model(a), b).backward()
        optimizer.step()
    loss = first = 0.0
    with torch.no_grad():
        for a, b in test:
            out = model(a)
            loss += F.cross_entropy(out, b, reduction="sum").item()
            first += out[:, 0].sum().item()
    print(f"epoch {epoch} has the class {names[int(loss > 40)]}")
    print("the first output is above its mean:", first > threshold)
    print("the ratio", torch.tensor(1.0 if loss > 40 else 0.0).log().item(), "is finite")
    if loss > 40:
        print("a good start")
    print(f"loss {samestep.sum(loss) / 48:.4f}")
