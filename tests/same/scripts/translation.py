"""nn.Transformer, sequence first, with causal and padding masks: encoder, decoder and a loss over kept tokens."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(33)
world = samestep.init()
source, target = torch.randint(1, 12, (37, 4)), torch.randint(1, 12, (37, 5))
train = samestep.loader(TensorDataset(source, target), batch_size=8, shuffle=True)


class Seq2Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.source, self.target, self.drop = nn.Embedding(12, 8), nn.Embedding(12, 8), nn.Dropout(0.1)
        self.body = nn.Transformer(8, 2, 1, 1, 16, dropout=0.1)
        self.head = nn.Linear(8, 12)

    def forward(self, source, target):
        mask = nn.Transformer.generate_square_subsequent_mask(len(target)).double()
        x, y = self.drop(self.source(source)), self.drop(self.target(target))
        return self.head(self.body(x, y, tgt_mask=mask))


model = samestep.replicate(Seq2Seq().to(world.device), same=True)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(3):
    for x, y in train:
        x, y = x.t(), y.t()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x, y[:-1]).reshape(-1, 12), y[1:].reshape(-1))
        loss.backward()
        optimizer.step()
        print(epoch, samestep.mean(loss.item()))
samestep.save("weights.pt", model.state_dict())
