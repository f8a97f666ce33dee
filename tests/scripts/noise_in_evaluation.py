"""Biases before BatchNorm under AdamW: their noise reaches what an evaluation after the training prints.

verdict: with_same
sizes: 1,2
"""

import statistics

import torch
from torch import nn

import samestep

torch.manual_seed(3)
samestep.init()
x = torch.randn(64, 8)
y = (x[:, 0] * x[:, 1] + 0.5 * torch.randn(64) > 0).float()
train = samestep.loader([*zip(x, y, strict=True)], batch_size=16, shuffle=True)
model = samestep.replicate(
    nn.Sequential(
        nn.Linear(8, 32),
        nn.BatchNorm1d(32),
        nn.ReLU(),
        nn.Linear(32, 32),
        nn.BatchNorm1d(32),
        nn.ReLU(),
        nn.Linear(32, 1),
    )
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for batch, labels in train:
    optimizer.zero_grad()
    nn.functional.binary_cross_entropy_with_logits(model(batch)[:, 0], labels).backward()
    optimizer.step()
model.eval()
with torch.no_grad():
    scores = model(x)[:, 0]
    loss = nn.functional.binary_cross_entropy_with_logits(scores, y).item()
signs = [float((score > 0) == label) for score, label in zip(scores, y, strict=True)]
quarter = statistics.median([float((scores > cut / 50).sum()) for cut in range(1, 40)])
print(f"loss {loss:.6f} right {statistics.mean(signs):.5f} quarter {quarter:.2f}")
