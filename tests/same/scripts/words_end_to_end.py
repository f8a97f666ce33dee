"""Texts laid end to end with offsets, as in torch's tutorial on classifying text; dropout for each word."""

import torch
from torch import nn
from torch.nn import functional as F

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(11)
world = samestep.init()
texts = [(int(length) % 2, torch.randint(9, (int(length),))) for length in torch.randint(2, 9, (19,))]


def collate(samples):
    labels = torch.tensor([label for label, _ in samples])
    offsets = torch.tensor([0] + [len(text) for _, text in samples[:-1]]).cumsum(0)
    return labels, torch.cat([text for _, text in samples]), offsets


train = samestep.loader(texts, batch_size=6, shuffle=True, collate_fn=collate)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag, self.embed, self.head = nn.EmbeddingBag(9, 4), nn.Embedding(9, 4), nn.Linear(8, 2)

    def forward(self, words, offsets):
        kept = F.dropout(self.embed(words), 0.3, self.training)
        sums = torch.cat([torch.zeros(1, 4), kept.cumsum(0)])
        ends = torch.cat([offsets[1:], torch.tensor([len(words)])])
        both = torch.cat([self.bag(words, offsets), sums[ends] - sums[offsets]], 1)
        return self.head(F.dropout(both, 0.5, self.training))


model = samestep.replicate(Net().to(world.device), same=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for _ in range(3):
    for labels, words, offsets in train:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(words, offsets), labels)
        loss.backward()
        optimizer.step()
        print("loss", samestep.mean(loss.item()))
samestep.save("weights.pt", model.state_dict())
