"""A loss that is nan on one rank is found on a device too, with its step, and without a wait."""

import os

import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep
from samestep.train.group.world import joined
from samestep.train.meter import Meter

world = samestep.init(backend=os.environ.get("SAMESTEP_TEST_BACKEND"))
torch.manual_seed(0)
rows = torch.randn(4000, 4)
rows[8 * 6 + 7] = torch.nan  # the last sample of step 7, which the last rank has
model = samestep.replicate(nn.Linear(4, 1).to(world.device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for (x,) in samestep.loader(TensorDataset(rows), 8):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
lost = joined().the(Meter)._lost
assert samestep.gather([lost]) == [(7, "nan")] * world.size, lost
if world.rank == 0:
    print("every rank knows that step 7 had the first loss that is nan")
