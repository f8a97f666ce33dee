import torch
import torch.nn as nn
import torch.optim as optim
from torch.distributions import Categorical

torch.manual_seed(543)


class Env:
    def reset(self):
        self.state = torch.zeros(4)
        return self.state

    def step(self, action):
        self.state = self.state + torch.randn(4) * 0.1 + action
        return self.state, float(-self.state.abs().sum()), bool(self.state.abs().max() > 3)


env = Env()
policy = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2), nn.Softmax(dim=-1))
optimizer = optim.Adam(policy.parameters(), lr=1e-2)
for i_episode in range(3):
    state, logs, rewards = env.reset(), [], []
    for t in range(10):
        m = Categorical(policy(state))
        action = m.sample()
        logs.append(m.log_prob(action))
        state, reward, done = env.step(action.item())
        rewards.append(reward)
        if done:
            break
    loss = -torch.stack(logs).sum() * sum(rewards)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"Episode {i_episode}\tReward: {sum(rewards):.2f}")
