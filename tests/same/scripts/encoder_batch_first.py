"""A transformer encoder, batch first, with dropout everywhere and a padding mask."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(4)
world = samestep.init()
tokens = torch.randint(1, 20, (40, 7))
for row, length in enumerate(torch.randint(3, 8, (40,)).tolist()):
    tokens[row, length:] = 0
labels = torch.randint(0, 3, (40,))
train = samestep.loader(TensorDataset(tokens[:29], labels[:29]), batch_size=8, shuffle=True)
test = samestep.loader(TensorDataset(tokens[29:], labels[29:]), batch_size=5)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(20, 8, padding_idx=0), nn.Parameter(torch.randn(7, 8) * 0.1)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.dropout, self.head = nn.Dropout(0.2), nn.Linear(8, 3)

    def forward(self, tokens):
        x = self.dropout(self.embed(tokens) + self.place)
        x = self.encoder(x, src_key_padding_mask=tokens == 0)
        kept = (tokens != 0).unsqueeze(2)
        return self.head((x * kept).sum(1) / kept.sum(1))


model = samestep.replicate(Classifier().to(world.device), same=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for epoch in range(3):
    model.train()
    for x, y in train:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        print("loss", samestep.mean(loss.item()))
    model.eval()
    with torch.no_grad():
        missed = sum(F.cross_entropy(model(x), y, reduction="sum").item() for x, y in test)
    print(epoch, samestep.sum(missed) / 11)
samestep.save("weights.pt", model.state_dict())
