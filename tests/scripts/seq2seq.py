"""An encoder and a decoder with optimizers of their own, and teacher forcing.

verdict: same
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.gru = nn.Embedding(10, 6), nn.GRU(6, 8, batch_first=True)

    def forward(self, x):
        return self.gru(self.embed(x))[1]


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.gru = nn.Embedding(10, 6), nn.GRU(6, 8, batch_first=True)
        self.out = nn.Linear(8, 10)

    def forward(self, y, hidden):
        return self.out(self.gru(self.embed(y), hidden)[0])


torch.manual_seed(0)
samestep.init()
source, target = torch.randint(0, 10, (30, 5)), torch.randint(0, 10, (30, 6))
loader = samestep.loader(TensorDataset(source, target), 6, shuffle=True)
encoder, decoder = samestep.replicate(Encoder()), samestep.replicate(Decoder())
encoder_optimizer = torch.optim.Adam(encoder.parameters(), lr=0.01)
decoder_optimizer = torch.optim.Adam(decoder.parameters(), lr=0.01)
for _ in range(2):
    for x, y in loader:
        encoder_optimizer.zero_grad()
        decoder_optimizer.zero_grad()
        output = decoder(y[:, :-1], encoder(x))
        F.nll_loss(F.log_softmax(output, -1).flatten(0, 1), y[:, 1:].flatten()).backward()
        encoder_optimizer.step()
        decoder_optimizer.step()
