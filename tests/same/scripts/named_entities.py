"""Names in sentences: packed sequences that are padded again, beside labels of the whole batch's length."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(31)
world = samestep.init()
data = [(torch.randint(1, 9, (n,)), torch.randint(0, 3, (n,))) for n in torch.randint(2, 9, (23,)).tolist()]


def collate(samples):
    x, y = zip(*sorted(samples, key=lambda pair: -len(pair[0])), strict=True)
    return pad_sequence(x, True), pad_sequence(y, True, -1), torch.tensor([len(row) for row in x])


train = samestep.loader(data, batch_size=6, shuffle=True, collate_fn=collate)
test = samestep.loader(data, batch_size=7, collate_fn=collate)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.dropout = nn.Embedding(9, 5, padding_idx=0), nn.Dropout(0.3)
        self.lstm, self.head = nn.LSTM(5, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(self.dropout(self.words(x)), lengths, batch_first=True)
        hidden, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return self.head(hidden)


model = samestep.replicate(Net(), same=True, loss="sum")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _epoch in range(3):
    for x, y, n in train:
        optimizer.zero_grad()
        o = model(x, n)
        total = F.cross_entropy(o.flatten(0, 1), y.flatten(), ignore_index=-1, reduction="sum")
        loss = total / samestep.sum((y > -1).sum())
        loss.backward()
        optimizer.step()
        print(samestep.sum(loss.item()))
    with torch.no_grad():
        print(
            samestep.sum(
                sum(((model(x, n).argmax(-1) - y) * (y > -1)).abs().sum().item() for x, y, n in test)
            )
        )
samestep.save("weights.pt", model.state_dict())
