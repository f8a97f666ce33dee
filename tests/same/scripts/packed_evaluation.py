"""Packed sequences through recurrent layers with dropout, and an evaluation that draws and ends with one sample."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import TensorDataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(31)
world = samestep.init()
data = TensorDataset(torch.randn(23, 7, 8), torch.randint(0, 3, (23,)))
train = samestep.loader(data, batch_size=6, shuffle=True)
test = samestep.loader(data, batch_size=11)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru, self.head = nn.GRU(8, 5, 2, dropout=0.3, bidirectional=True), nn.Linear(10, 3)

    def forward(self, x):
        lengths = 1 + (x[:, 0, 0].abs() * 5).long().clamp(max=6)
        packed = pack_padded_sequence(x.transpose(0, 1), lengths, enforce_sorted=False)
        return self.head(pad_packed_sequence(self.gru(packed)[0])[0].sum(0) / 7)


model = samestep.replicate(Net(), same=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _epoch in range(3):
    for step, (x, y) in enumerate(train):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        print(samestep.mean(loss.item()))
        if step == 1:
            with torch.no_grad():
                print(samestep.sum(sum((model(a).argmax(1) == b).sum().item() for a, b in test)))
samestep.save("weights.pt", model.state_dict())
