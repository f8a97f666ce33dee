"""BatchNorm, dropout and clipping, in microbatches, with checkpoints."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(0)
samestep.init()
data = TensorDataset(torch.randn(44, 6), torch.randint(0, 3, (44,)))
train = samestep.steps(data, 12, microbatch=3, shuffle=True)
net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3))
model = samestep.replicate(net, exact=True)
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
checkpoint = samestep.Checkpoint("kept", every=3, model=model, optimizer=optimizer, train=train)
checkpoint.resume()
for _ in train.epochs(2):
    model.train()
    for step in train:
        for x, y in step:
            F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        checkpoint.step()
    model.eval()
    with torch.no_grad():
        right = (model(data.tensors[0]).argmax(1) == data.tensors[1]).sum().item()
    print(f"accuracy {right / len(data):.1%}")
