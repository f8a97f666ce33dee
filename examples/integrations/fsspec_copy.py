"""Copies each epoch's weights to a store that fsspec knows: `file://`, `s3://`, `gs://`, …"""

import sys
from pathlib import Path

import fsspec
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import samestep

there, folder = fsspec.core.url_to_fs(sys.argv[1])  # such as s3://bucket/run-7
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
        there.pipe_file(f"{folder}/epoch-{epoch}.pt", Path("model.pt").read_bytes())

if world.rank == 0:
    print([Path(name).name for name in sorted(there.ls(folder, detail=False))])
