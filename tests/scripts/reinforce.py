"""pytorch/examples reinforce: every rank plays the episode, with a policy that samples.

verdict: with_same
"""

import torch
from torch import nn
from torch.distributions import Categorical

import samestep

torch.manual_seed(543)
samestep.init()
policy = samestep.replicate(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2), nn.Softmax(dim=-1)))
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
for episode in range(4):
    state, log_probs, rewards = torch.zeros(1, 4), [], []
    for _ in range(6):
        choice = Categorical(policy(state))
        action = choice.sample()
        log_probs.append(choice.log_prob(action))
        state = torch.tanh(state + (action.float() * 2 - 1) * torch.tensor([[0.3, -0.2, 0.1, 0.4]]))
        rewards.append(float(state.sum()))
    returns, total = [], 0.0
    for reward in rewards[::-1]:
        total = reward + 0.99 * total
        returns.insert(0, total)
    returns = torch.tensor(returns)
    loss = torch.cat([-log_prob * back for log_prob, back in zip(log_probs, returns - returns.mean())]).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
