"""A word language model, sequence first: locked and plain dropout, a GRU, and logits flattened over time and batch."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(9)
world = samestep.init()
words = torch.randint(0, 13, (37, 5))
train = samestep.loader(TensorDataset(words), batch_size=8, shuffle=True)


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.drop = nn.Embedding(13, 6), nn.Dropout(0.2)
        self.gru, self.head = nn.GRU(6, 6, num_layers=2, dropout=0.3), nn.Linear(6, 13)

    def forward(self, words):
        x = self.drop(self.embed(words))
        if self.training:
            x = x * torch.empty(1, x.shape[1], 6).bernoulli_(0.8) / 0.8
        x, _ = self.gru(x)
        return self.head(self.drop(x.reshape(-1, 6)))


model = samestep.replicate(LanguageModel().to(world.device), same=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for epoch in range(3):
    for (rows,) in train:
        rows = rows.t()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(rows[:-1]), rows[1:].reshape(-1))
        loss.backward()
        optimizer.step()
        print("loss", samestep.mean(loss.item()))
    model.eval()
    with torch.no_grad():
        print(epoch, F.cross_entropy(model(words.t()[:-1]), words.t()[1:].reshape(-1)).item())
    model.train()
samestep.save("weights.pt", model.state_dict())
