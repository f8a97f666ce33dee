"""Attention by einsum with dropout, in shares down to one sample, whose size of 1 einsum lays into another size."""

import torch
from torch import einsum, nn
from torch.nn import functional as F

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(24)
samestep.init()
train = samestep.loader(torch.randint(0, 20, (37, 9)), batch_size=5, shuffle=True)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.query, self.key, self.value = (
            nn.Embedding(20, 8),
            *(nn.Linear(8, 8) for _ in range(3)),
        )
        self.dropout, self.head = nn.Dropout(0.3), nn.Linear(8, 20)

    def forward(self, x):
        hidden = self.embed(x)
        q, k, v = (
            layer(hidden).unflatten(-1, (2, 4)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        scores = einsum("b h i d, b h j d -> b h i j", q, k)
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -1e9)
        out = einsum("b h i j, b h j d -> b h i d", self.dropout(scores.softmax(-1)), v)
        return self.head(self.dropout(out.transpose(1, 2).flatten(-2)))


model = samestep.replicate(Attention(), same=True)
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
for _ in range(3):
    for x in train:
        loss = F.cross_entropy(model(x[:, :-1]).transpose(1, 2), x[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(samestep.mean(loss.item()))
samestep.save("weights.pt", model.state_dict())
