"""Reads a WebDataset as a stream: each rank takes every size-th sample, and the same number of batches."""

from itertools import islice
from pathlib import Path

import torch
import webdataset

import samestep

BATCH = 16
world = samestep.init()
with samestep.first():  # one process makes what the others read
    if not Path("digits.tar").exists():
        with webdataset.TarWriter("digits.tar") as tar:
            for i in range(100):
                tar.write({"__key__": f"{i:04d}", "x.pth": torch.randn(8), "y.cls": i % 3})

torch.manual_seed(0)
samples = webdataset.WebDataset("digits.tar", shardshuffle=False, nodesplitter=None, workersplitter=None)
share = BATCH // world.size
mine = islice(samples.decode().to_tuple("x.pth", "y.cls"), world.rank, None, world.size)
model = samestep.replicate(torch.nn.Linear(8, 3).to(world.device))
optimizer = torch.optim.SGD(model.parameters(), 0.1)

for _ in range(100 // BATCH):
    xs, ys = zip(*islice(mine, share), strict=True)
    x, y = torch.stack(xs).to(world.device), torch.tensor(ys, device=world.device)
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()

print(f"weight {model.weight.sum().item():.4f}")
