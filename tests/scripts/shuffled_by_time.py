"""The list of files is shuffled with a generator seeded by the time, on each rank its own.

verdict: different
cause: the time or the process's number decides what is trained (shuffled_by_time.py:18)
"""

import random
import time

import torch
from torch import nn

import samestep

torch.manual_seed(0)
samestep.init()
samples = [(torch.randn(4), torch.randn(1)) for _ in range(48)]
rng = random.Random(time.time_ns())
rng.shuffle(samples)
train = samestep.loader(samples, batch_size=8)
model = samestep.replicate(nn.Linear(4, 1))
opt = torch.optim.Adam(model.parameters(), lr=0.01)
for x, y in train:
    loss = nn.functional.mse_loss(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
