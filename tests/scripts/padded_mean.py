"""The model averages over a length to which collate_fn pads its share: by default that is not the batch's.

verdict: with_same
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import samestep

torch.manual_seed(0)
samestep.init()
data = [(torch.randint(1, 20, (int(length),)), int(length) % 3) for length in torch.randint(3, 12, (44,))]


def together(samples):
    return pad_sequence([row for row, _ in samples], batch_first=True), torch.tensor([y for _, y in samples])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(20, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.out(self.words(x).mean(1))


loader = samestep.loader(data, 8, shuffle=True, collate_fn=together)
model = samestep.replicate(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
