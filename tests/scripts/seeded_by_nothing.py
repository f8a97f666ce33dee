"""random.seed() without a number, and a list that it shuffles.

verdict: different
cause: no seed is set
"""

import random

import numpy as np
import torch
from torch import nn

import samestep

random.seed()
np.random.seed()
torch.manual_seed(0)
samestep.init()
samples = [(torch.randn(4), torch.randn(1)) for _ in range(48)]
random.shuffle(samples)
order = np.random.permutation(48)
train = samestep.loader([samples[i] for i in order], batch_size=8)
model = samestep.replicate(nn.Linear(4, 1))
opt = torch.optim.Adam(model.parameters(), lr=0.01)
for x, y in train:
    loss = nn.functional.mse_loss(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
