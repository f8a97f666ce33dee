"""An LSTM over packed sequences of unlike lengths, padded in collate_fn, with dropout between its layers."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(10)
world = samestep.init()
data = [(torch.randn(2 + n % 5, 3), n % 3) for n in range(37)]


def collate(samples):
    rows, labels = zip(*samples, strict=True)
    return (
        pad_sequence(rows, batch_first=True),
        torch.tensor([len(row) for row in rows]),
        torch.tensor(labels),
    )


train = samestep.loader(data, batch_size=8, shuffle=True, collate_fn=collate)


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 4, num_layers=2, dropout=0.4, batch_first=True)
        self.head = nn.Sequential(nn.Dropout(0.3), nn.Linear(4, 3))

    def forward(self, rows, lengths):
        _, (last, _) = self.lstm(pack_padded_sequence(rows, lengths, batch_first=True, enforce_sorted=False))
        return self.head(last[-1])


model = samestep.replicate(Reader().to(world.device), same=True)
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
for epoch in range(3):
    for rows, lengths, labels in train:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(rows, lengths), labels)
        loss.backward()
        optimizer.step()
        print(epoch, samestep.mean(loss.item()))
samestep.save("weights.pt", model.state_dict())
