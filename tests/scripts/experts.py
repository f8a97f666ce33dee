"""A mixture of experts: each has dropout over the rows that a mask chooses for it.

verdict: different
cause: bernoulli_.float (experts.py
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(0)
samestep.init()
x = torch.randn(53, 6)
loader = samestep.loader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=12, shuffle=True)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(6, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Dropout(0.2), nn.Linear(8, 6)) for _ in range(3)
        )
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        gates = self.gate(x).softmax(1)
        chosen = gates.argmax(1)
        out = torch.zeros_like(x)
        for at, expert in enumerate(self.experts):
            mask = chosen == at
            out[mask] = expert(x[mask]) * gates[mask, at, None]
        return self.head(x + out)


model = samestep.replicate(Experts())
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range(2):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
