"""A mean over the labels that are not ignored, in a model with dropout; the printed loss is that of a share.

verdict: different
cause: the loss is divided by a count in each rank's share
printed: loss
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(5)
samestep.init()
tokens = torch.randint(1, 16, (32, 6))
tokens[torch.arange(6) >= torch.randint(2, 7, (32, 1))] = 0
labels = torch.where(tokens == 0, -100, tokens % 5)
loader = samestep.loader(TensorDataset(tokens, labels), batch_size=8, shuffle=True)
model = samestep.replicate(nn.Sequential(nn.Embedding(16, 8), nn.Dropout(0.1), nn.Linear(8, 5)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for epoch in range(2):
    total = 0.0
    for x, y in loader:
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    print(f"epoch {epoch} loss {total / len(loader):.4f}")
