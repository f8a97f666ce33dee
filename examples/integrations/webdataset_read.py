"""Reads a WebDataset: every rank reads the stream, and `loader` gives each its share of every batch."""

from pathlib import Path

import torch
import webdataset

import samestep

world = samestep.init()
with samestep.first():  # one process makes what the others read
    if not Path("digits.tar").exists():
        with webdataset.TarWriter("digits.tar") as tar:
            for i in range(100):
                tar.write({"__key__": f"{i:04d}", "x.pth": torch.randn(8), "y.cls": i % 3})

torch.manual_seed(0)
samples = webdataset.WebDataset("digits.tar", shardshuffle=False, nodesplitter=None)
train = samestep.loader(samples.shuffle(20, seed=0).decode().to_tuple("x.pth", "y.cls"), batch_size=16)
model = samestep.replicate(torch.nn.Linear(8, 3).to(world.device))
optimizer = torch.optim.SGD(model.parameters(), 0.1)

for x, y in train:
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()

print(f"weight {model.weight.sum().item():.4f}")
