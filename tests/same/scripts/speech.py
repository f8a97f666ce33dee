"""Speech with CTC: a dataclass of padded signals and of labels laid end to end, read in both directions."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(3)
samestep.init()


@dataclass
class Batch:
    signals: torch.Tensor
    labels: torch.Tensor
    signal_lengths: torch.Tensor
    label_lengths: torch.Tensor


def spoken():
    label = torch.randint(1, 6, (int(torch.randint(1, 5, ())),))
    signal = F.one_hot(label.repeat_interleave(3), 6).double()
    return signal + 0.1 * torch.randn(signal.shape), label


def collate(samples):
    signals = nn.utils.rnn.pad_sequence([signal for signal, _ in samples], batch_first=True)
    lengths = (torch.tensor([len(sample[at]) for sample in samples]) for at in (0, 1))
    return Batch(signals, torch.cat([label for _, label in samples]), *lengths)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.drop = nn.Conv1d(6, 10, 3, padding=1), nn.Dropout(0.1)
        self.gru = nn.GRU(10, 10, bidirectional=True, batch_first=True)
        self.head = nn.Linear(20, 6)

    def forward(self, x):
        x = self.drop(F.gelu(self.conv(x.transpose(1, 2)))).transpose(1, 2)
        return self.head(self.gru(x)[0]).log_softmax(-1).transpose(0, 1)


speech = [spoken() for _ in range(38)]
train = samestep.loader(speech, 9, shuffle=True, collate_fn=collate, num_workers=0)
model = samestep.replicate(Net(), same=True)
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
for _ in range(3):
    for batch in train:
        heard = model(batch.signals)
        loss = F.ctc_loss(heard, batch.labels, batch.signal_lengths, batch.label_lengths, zero_infinity=True)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(samestep.mean(loss.item()))
samestep.save("weights.pt", model.state_dict())
