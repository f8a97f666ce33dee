"""REINFORCE: actions drawn from what the model gives, by multinomial and by torch.distributions."""

import torch
from torch import nn
from torch.distributions import Bernoulli, Categorical, Normal
from torch.utils.data import TensorDataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(18)
world = samestep.init()
train = samestep.loader(TensorDataset(torch.randn(37, 6)), batch_size=8, shuffle=True)
policy = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 6))
policy = samestep.replicate(policy.to(world.device), same=True)
optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)
for epoch in range(3):
    for (state,) in train:
        out = policy(state)
        choice = Categorical(logits=out[:, :3])
        action = choice.sample()
        move = Normal(out[:, 3], out[:, 4].exp())
        amount = move.rsample()
        stop = Bernoulli(logits=out[:, 5])
        stopped = stop.sample()
        extra = torch.multinomial(out[:, :3].detach().softmax(1), 2)
        reward = (
            state.gather(1, extra).sum(1) - (action - 1) * state[:, 0] - (amount - 1) ** 2 * (1 - stopped)
        )
        logs = choice.log_prob(action) + stop.log_prob(stopped)
        loss = -(logs * reward.detach() + reward).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(epoch, samestep.mean(loss.item()), samestep.sum(action.sum()).item())
samestep.save("weights.pt", policy.state_dict())
