"""An agent's memory as a data set: the batches come from a DataLoader."""

import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class Replay(Dataset):
    def __init__(self):
        self.memory = []

    def push(self, *transition):
        self.memory.append(transition)

    def __len__(self):
        return len(self.memory)

    def __getitem__(self, i):
        s, a, r, s2 = self.memory[i]
        return s, torch.tensor(a), torch.tensor(r), s2


random.seed(1)
torch.manual_seed(1)
memory = Replay()
for _ in range(50):
    memory.push(torch.randn(4), random.randrange(2), random.random(), torch.randn(4))
policy_net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
target_net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
target_net.load_state_dict(policy_net.state_dict())
optimizer = torch.optim.RMSprop(policy_net.parameters())
loader = DataLoader(memory, batch_size=12, shuffle=True)
steps_done = 0
for episode in range(3):
    q_total = 0
    for state, action, reward, next_state in loader:
        q = policy_net(state).gather(1, action.unsqueeze(1))
        with torch.no_grad():
            next_q = target_net(next_state).max(1)[0]
        expected = reward + 0.9 * next_q
        loss = F.smooth_l1_loss(q, expected.unsqueeze(1))
        optimizer.zero_grad()
        loss.backward()
        for param in policy_net.parameters():
            param.grad.data.clamp_(-1, 1)
        optimizer.step()
        steps_done += 1
        q_total += q.sum().item()
    target_net.load_state_dict(policy_net.state_dict())
    print(episode, steps_done, "mean q", q_total / len(memory), "last loss", loss.item())
torch.save(policy_net.state_dict(), "policy.pt")
