"""Copies each epoch's weights to a store that fsspec knows: `file://`, `s3://`, `gs://`, …"""

import sys

import fsspec
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import samestep

store = sys.argv[1]  # such as s3://bucket/run-7
world = samestep.init()
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(200, 8), torch.randint(0, 3, (200,)))
train = samestep.loader(dataset, batch_size=32, shuffle=True)
model = samestep.replicate(torch.nn.Linear(8, 3).to(world.device))
optimizer = torch.optim.SGD(model.parameters(), 0.1)

for epoch in range(2):
    for x, y in train:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    samestep.save("model.pt", model.state_dict())
    if world.rank == 0:
        # A new name for each epoch: a store has no rename, and a half-written object must not replace a good one.
        with fsspec.open(f"{store}/epoch-{epoch}.pt", "wb") as there, open("model.pt", "rb") as here:
            there.write(here.read())
