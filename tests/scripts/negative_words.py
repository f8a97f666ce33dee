"""Skip-grams: negative words are drawn in the loop, several for each sample, in one dimension.

verdict: different
cause: multinomial (negative_words.py
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

torch.manual_seed(0)
samestep.init()
words = torch.randint(0, 20, (62,))
loader = samestep.loader(TensorDataset(words[:-1], words[1:]), batch_size=13, shuffle=True)
frequency = torch.bincount(words, minlength=20).float() ** 0.75


class SkipGram(nn.Module):
    def __init__(self):
        super().__init__()
        self.center, self.context = nn.Embedding(20, 6), nn.Embedding(20, 6)

    def forward(self, center, near, negative):
        v = self.center(center)
        right = F.logsigmoid((self.context(near) * v).sum(1))
        wrong = F.logsigmoid(-(self.context(negative) @ v[:, :, None]).squeeze(2)).sum(1)
        return -(right + wrong).mean()


model = samestep.replicate(SkipGram())
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
for _ in range(2):
    for center, near in loader:
        negative = torch.multinomial(frequency, len(center) * 3, replacement=True).view(len(center), 3)
        loss = model(center, near, negative)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
