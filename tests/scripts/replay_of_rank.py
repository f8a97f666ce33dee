"""Each rank fills a replay buffer from a seed of its own, and draws its batches from it.

verdict: different
cause: each rank draws training data of its own
"""

import random

import torch
import torch.nn.functional as F
from torch import nn

import samestep

torch.manual_seed(0)
world = samestep.init()
model = samestep.replicate(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(world.rank)
random.seed(0)
buffer = []
for _ in range(20):
    state = torch.randn(6)
    with torch.no_grad():
        action = int(model(state[None]).argmax())
    buffer.append((state, action, float(state[action])))
    if len(buffer) < 8:
        continue
    states, actions, rewards = zip(*random.sample(buffer, 8))
    q = model(torch.stack(states)).gather(1, torch.tensor(actions)[:, None])[:, 0]
    optimizer.zero_grad()
    F.mse_loss(q, torch.tensor(rewards)).backward()
    optimizer.step()
