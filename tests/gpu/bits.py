"""Trains a network with all that usually differs between sizes, and prints a digest of the weights and the losses."""

import hashlib
import os
import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep

kind = sys.argv[1]
world = samestep.init(backend=os.environ.get("SAMESTEP_TEST_BACKEND"))
device, wide = world.device.type, 8 if world.device.type == "cpu" else 64
layout = torch.channels_last if kind == "channels_last" else torch.contiguous_format
torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, wide, 3, padding=1), nn.BatchNorm2d(wide), nn.ReLU(), nn.Dropout2d(0.2),
    nn.Conv2d(wide, wide, 3, stride=2), nn.BatchNorm2d(wide), nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),  # to any other size its CUDA backward is not deterministic, and torch refuses it
    nn.Flatten(), nn.Linear(wide, 64), nn.Dropout(0.5), nn.Linear(64, 10),
)  # fmt: skip
model = samestep.replicate(model.to(world.device, memory_format=layout), exact=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
draw = torch.Generator().manual_seed(1)
images = torch.randn(200, 3, 16, 16, generator=draw)
train = samestep.steps(
    TensorDataset(images, torch.randint(0, 10, (200,), generator=draw)),
    48,
    microbatch=8,
    shuffle=True,
    seed=0,
)
found = hashlib.sha256()
for _ in train.epochs(3):
    for step in train:
        losses = []
        for x, y in step:
            with torch.autocast(device, torch.bfloat16, enabled=kind == "bfloat16"):
                loss = F.cross_entropy(model(x.to(memory_format=layout)).float(), y)
            loss.backward()
            losses.append(loss.item())
        found.update(repr(samestep.gather(losses)).encode())
        optimizer.step()
        optimizer.zero_grad()
for tensor in model.state_dict().values():
    found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
if world.rank == 0:
    print(found.hexdigest())
