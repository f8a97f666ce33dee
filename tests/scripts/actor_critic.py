"""Two heads on one body, two losses added; the replay is a data set that the loader shares.

verdict: same
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.actor, self.critic = nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(8, 1)

    def forward(self, state):
        hidden = torch.tanh(self.body(state))
        return F.log_softmax(self.actor(hidden), -1), self.critic(hidden).squeeze(-1)


torch.manual_seed(0)
samestep.init()
replay = TensorDataset(torch.randn(40, 4), torch.randint(0, 2, (40,)), torch.randn(40))
model = samestep.replicate(ActorCritic())
optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
for _ in range(2):
    for state, action, value in samestep.loader(replay, 10, shuffle=True):
        log_probs, expected = model(state)
        advantage = value - expected.detach()
        actor = -(log_probs.gather(1, action[:, None]).squeeze(1) * advantage).mean()
        critic = F.smooth_l1_loss(expected, value)
        optimizer.zero_grad()
        (actor + 0.5 * critic).backward()
        optimizer.step()
