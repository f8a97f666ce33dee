"""Policy gradient with sampled actions, a value head, an entropy bonus and advantages normalized over the batch."""

import torch
from torch import nn
from torch.distributions import Categorical
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(4)
samestep.init()
states = torch.randn(41, 5)
goal = torch.randn(5, 3)
train = samestep.loader(TensorDataset(states), batch_size=10, shuffle=True)


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Dropout(0.1))
        self.policy, self.value = nn.Linear(16, 3), nn.Linear(16, 1)

    def forward(self, s):
        h = self.trunk(s)
        return Categorical(logits=self.policy(h)).logits, self.value(h).squeeze(-1)


model = samestep.replicate(ActorCritic(), same=True)
opt = torch.optim.RMSprop(model.parameters(), lr=5e-3)
for _ in range(3):
    for (s,) in train:
        logits, value = model(s)
        dist = Categorical(logits=logits)
        action = dist.sample()
        reward = (s @ goal).gather(1, action[:, None]).squeeze(1) + 0.1 * torch.randn(len(s))
        advantage = reward - value.detach()
        n = samestep.sum(len(s))
        mean = samestep.sum(advantage.sum()) / n
        std = (samestep.sum((advantage - mean).square().sum()) / (n - 1)).sqrt() if n > 1 else torch.ones(())
        advantage = (advantage - mean) / (std + 1e-8)
        loss = -(dist.log_prob(action) * advantage).mean() + 0.5 * F.mse_loss(value, reward)
        loss = loss - 0.01 * dist.entropy().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(samestep.mean(loss.item()), samestep.mean(reward.mean().item()))
samestep.save("weights.pt", model.state_dict())
