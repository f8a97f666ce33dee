"""Words that a collate_fn masks at random, in a dataset that the loop makes longer in each epoch."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import samestep


class Words(Dataset):
    most = 4

    def __init__(self):
        self.texts = [torch.randint(1, 30, (4 + at % 5,)) for at in range(29)]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, at):
        return self.texts[at][: self.most]


def masked(texts):
    words = nn.utils.rnn.pad_sequence(texts, batch_first=True)
    chosen = torch.bernoulli(torch.full(words.shape, 0.3)).bool() & (words > 0)
    return words.masked_fill(chosen, 0), words, chosen


torch.set_default_dtype(torch.float64)
torch.manual_seed(5)
world = samestep.init()
words = Words()
train = samestep.loader(words, batch_size=8, shuffle=True, collate_fn=masked)
model = nn.Sequential(nn.Embedding(30, 12), nn.Dropout(0.2), nn.Linear(12, 30))
model = samestep.replicate(model.to(world.device), same=True)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(3):
    words.most = 4 + 2 * epoch
    for seen, every, chosen in train:
        optimizer.zero_grad()
        losses = F.cross_entropy(model(seen).transpose(1, 2), every, reduction="none")
        loss = (losses * chosen).sum(1).mean()
        loss.backward()
        optimizer.step()
        print(epoch, samestep.mean(loss.item()))
samestep.save("weights.pt", model.state_dict())
