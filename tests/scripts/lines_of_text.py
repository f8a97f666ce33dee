"""A stream of sentences, which are laid end to end in a batch.

verdict: same
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import IterableDataset

import samestep

torch.manual_seed(0)
samestep.init()
sentences = [torch.randint(0, 20, (1 + at % 6,)) for at in range(43)]


class Lines(IterableDataset):
    def __iter__(self):
        return iter([(words, int(words[0] > 9)) for words in sentences])


def end_to_end(items):
    lengths = torch.tensor([0, *(len(words) for words, _ in items[:-1])])
    return torch.cat([words for words, _ in items]), lengths.cumsum(0), torch.tensor([y for _, y in items])


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.EmbeddingBag(20, 6), nn.Linear(6, 2)

    def forward(self, words, offsets):
        return self.head(self.words(words, offsets))


model = samestep.replicate(Bag())
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
loader = samestep.loader(Lines(), batch_size=8, collate_fn=end_to_end)
for _ in range(2):
    for words, offsets, y in loader:
        loss = F.cross_entropy(model(words, offsets), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
