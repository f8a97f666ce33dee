"""Labelled rows and two views of unlabelled ones end to end in one call of a model that repeats its queries."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(7)
samestep.init()
points, labels = torch.randn(41, 6), torch.randint(0, 3, (41,))
train = samestep.loader(TensorDataset(points, labels, points.flip(0)), batch_size=12, shuffle=True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.queries = nn.Embedding(2, 6)
        self.decoder = nn.TransformerDecoderLayer(6, 2, 12, 0.2, batch_first=True)
        self.head = nn.Linear(12, 3)

    def forward(self, x):
        queries = self.queries.weight.unsqueeze(0).repeat(len(x), 1, 1)
        return self.head(self.decoder(queries, x.unsqueeze(1)).flatten(1))


model = samestep.replicate(Net(), same=True)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range(3):
    for x, y, u in train:
        weak, strong = u + 0.05 * torch.randn_like(u), u + 0.3 * torch.randn_like(u)
        output = model(torch.cat((x, weak, strong)))
        of_labelled, of_weak, of_strong = output.split([len(x)] * 3)
        guess = of_weak.detach().softmax(1)
        loss = F.cross_entropy(of_labelled, y) + F.cross_entropy(of_strong, guess)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(samestep.mean(loss.item()))
samestep.save("weights.pt", model.state_dict())
