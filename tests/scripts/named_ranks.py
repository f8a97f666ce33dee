"""Each rank prints its own loss with its number and saves its own log; a summary is of all ranks.

verdict: same
"""

import os

import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(0)
world = samestep.init()
print(
    f"hello from rank {world.rank} of {world.size}, pid {os.getpid()}, {48 // world.size} samples for each rank"
)
loader = samestep.loader(TensorDataset(torch.randn(48, 6), torch.randn(48, 1)), 12, shuffle=True)
model = samestep.replicate(nn.Linear(6, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for epoch in range(2):
    total = 0.0
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(x)
    print(f"[rank {world.rank}] epoch {epoch} own loss {total:.4f}")
    torch.save({"loss": total}, f"log-{world.rank}.pt")
    mean = samestep.sum(total) / 48
    if world.rank == 0:
        print(f"epoch {epoch} loss {mean:.4f}")
