"""PPO: advantages are normalized over the whole batch, so that the loss of the first step is zero but for rounding.

verdict: same
"""

import torch
from torch import nn
from torch.distributions import Categorical
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(0)
samestep.init()
seen, done, advantages = torch.randn(64, 4), torch.randint(0, 2, (64,)), torch.randn(64)
policy = samestep.replicate(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2)))
optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
with torch.no_grad():
    before = Categorical(logits=policy(seen)).log_prob(done)
data = TensorDataset(seen, done, advantages, before)
for epoch in range(3):
    for state, action, advantage, old in samestep.loader(data, 16, shuffle=True, seed=epoch):
        of_all = samestep.gather(advantage)
        scaled = (advantage - of_all.mean()) / (of_all.std() + 1e-8)
        ratio = (Categorical(logits=policy(state)).log_prob(action) - old).exp()
        loss = -torch.min(ratio * scaled, ratio.clamp(0.8, 1.2) * scaled).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
