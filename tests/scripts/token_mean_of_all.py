"""The sum over tokens is divided by the number of tokens of all ranks.

verdict: same
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
model = samestep.replicate(nn.Sequential(nn.Embedding(16, 8), nn.Dropout(0.0), nn.Linear(8, 5)), loss="sum")
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for epoch in range(2):
    total = 0.0
    for x, y in loader:
        mask = (y != -100).float()
        losses = F.cross_entropy(model(x).transpose(1, 2), y, ignore_index=-100, reduction="none")
        loss = (losses * mask).sum() / samestep.sum(mask.sum())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    print(f"loss {samestep.sum(total) / len(loader):.4f}")
