"""An evaluation in two passes: outputs without gradients, then the labels; its last batch has one sample."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(23)
samestep.init()
data = TensorDataset(torch.randn(21, 6), torch.randint(0, 3, (21,)))
train = samestep.loader(data, batch_size=8, shuffle=True)
test = samestep.loader(data, batch_size=5)
model = samestep.replicate(nn.Sequential(nn.Linear(6, 9), nn.Dropout(0.2), nn.Linear(9, 3)), same=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model.train()
    for x, y in train:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    model.eval()
    empty = torch.empty(0, 3)
    with torch.no_grad():
        outputs = torch.cat([empty, *(model(x) for x, _ in test)])
    labels = torch.cat([empty[:, 0].long(), *(y for _, y in test)])
    print(samestep.sum(F.cross_entropy(outputs, labels, reduction="sum").item()) / 21)
samestep.save("weights.pt", model.state_dict())
