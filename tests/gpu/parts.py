"""The parts of a step that the meter measures on the device add up to the step, and a slow loader is seen as one."""

import os
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import samestep
from samestep.steptimes import PARTS
from samestep.train.group.device import synchronize
from samestep.train.group.world import joined
from samestep.train.meter import Meter

world = samestep.init(backend=os.environ.get("SAMESTEP_TEST_BACKEND"))
torch.manual_seed(0)
wide = 1024 if world.device.type == "cuda" else 4


class Images(Dataset):
    def __init__(self, seconds, count):
        self.seconds, self.images = seconds, torch.randn(count, 3, 32, 32)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, at):
        time.sleep(self.seconds)
        return self.images[at], at % 10


for seconds, count in ((0.0, 2400), (0.01, 240)):
    net = nn.Sequential(
        nn.Conv2d(3, wide, 3), nn.ReLU(), nn.Conv2d(wide, wide, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(wide, 10),
    )  # fmt: skip
    model = samestep.replicate(net.to(world.device))
    optimizer = torch.optim.AdamW(model.parameters())
    train = samestep.loader(Images(seconds, count), 24, shuffle=True, seed=0)
    for _ in train.epochs(2):
        synchronize(world.device)
        meter = joined().the(Meter)
        before, began = list(meter.times.sums) if meter.times else [0.0] * len(PARTS), time.monotonic()
        for x, y in train:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        synchronize(world.device)
        took = time.monotonic() - began
    sums = [now - then for now, then in zip(meter.times.sums, before, strict=True)]
    parts = dict(zip(PARTS, sums, strict=True))
    measured, data = sum(sums) / took, (parts["data"] + parts["copy"]) / took
    # the last step of the first epoch may be read in the second
    assert 0.9 < measured < 1.03 + 24 / count, (measured, took, parts)
    assert (data > 0.6) == (seconds > 0), (parts, took)
    if world.rank == 0:
        print(f"{measured:.3f} of the time in parts, {data:.0%} is data; a sample takes {1e3 * seconds:g} ms")
