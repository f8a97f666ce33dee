"""Words that differ without a mistake: of processes, ranks, dates, random names and the order of a set.

verdict: same
"""

import os
import socket
import tempfile
import time
import uuid

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(0)
world = samestep.init()


def log(text):
    print(f"{time.strftime('%d %b %H:%M:%S')} {uuid.uuid4().hex[:6]} {text}")


print("distributed over several processes" if world.size > 1 else "a single process")
print("host", socket.gethostname(), "as", "main" if world.rank == 0 else "helper", f"in rank{world.rank}")
print("below", tempfile.mkdtemp())
print(f"run{os.getpid()} with {object()}")
if world.size > 1:
    log("gradients are averaged")
    print("more than one process")
print("labels", {"cat", "dog"})
for label in {"fox", "owl"}:
    print(f"label {label}")
x = torch.randn(48, 6)
train = samestep.loader(TensorDataset(x, (x[:, 0] > 0).long()), 12, shuffle=True)
model = samestep.replicate(nn.Linear(6, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
best = 0.0
for epoch in range(3):
    right = 0
    for a, b in train:
        optimizer.zero_grad()
        out = model(a)
        F.cross_entropy(out, b).backward()
        optimizer.step()
        right += (out.argmax(1) == b).sum().item()
    right = samestep.sum(right)
    if right > best:
        log("a new best")
    best = max(best, right)
    print(f"[rank {world.rank}] epoch {epoch} {'ends' if world.rank == 0 else 'waits'}")
    log(f"epoch {epoch}: right {right}, {'good' if right > 24 else 'bad'}")
