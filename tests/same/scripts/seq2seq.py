"""Sequence to sequence: teacher forcing by Python's random, padded batches with the time in front, a loss of tokens."""

import random

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(2)
random.seed(2)
samestep.init()
PAD, BOS = 0, 1


class Pairs(Dataset):
    def __init__(self):
        g = torch.Generator().manual_seed(1)
        self.src = [
            torch.randint(2, 15, (int(n),), generator=g) for n in torch.randint(2, 7, (29,), generator=g)
        ]

    def __len__(self):
        return len(self.src)

    def __getitem__(self, i):
        return self.src[i], self.src[i].flip(0)


def collate(batch):
    src, trg = zip(*batch)
    return pad_sequence(src, padding_value=PAD), pad_sequence(trg, padding_value=PAD)


class Seq2Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb_in, self.emb_out = nn.Embedding(15, 6), nn.Embedding(15, 6)
        self.encoder, self.cell = nn.GRU(6, 8, num_layers=2, dropout=0.3), nn.GRUCell(6 + 8, 8)
        self.out, self.drop = nn.Linear(16, 15), nn.Dropout(0.3)

    def forward(self, src, trg, ratio=0.5):
        states, hidden = self.encoder(self.drop(self.emb_in(src)))
        h, word = hidden[-1], torch.full((src.shape[1],), BOS)
        logits = []
        for t in range(trg.shape[0]):
            weights = torch.softmax((states * h).sum(-1).masked_fill(src == PAD, -1e9), 0)
            context = (weights[..., None] * states).sum(0)
            h = self.cell(torch.cat([self.drop(self.emb_out(word)), context], 1), h)
            logits.append(self.out(torch.cat([h, context], 1)))
            word = trg[t] if random.random() < ratio else logits[-1].argmax(1)
        return torch.stack(logits)


train = samestep.loader(Pairs(), batch_size=7, shuffle=True, collate_fn=collate)
model = samestep.replicate(Seq2Seq(), same=True, loss="sum")
opt = torch.optim.Adam(model.parameters(), 1e-2)
for _ in range(3):
    for src, trg in train:
        logits = model(src, trg)
        tokens = samestep.sum((trg != PAD).sum().item())
        loss = F.cross_entropy(
            logits.view(-1, 15), trg.view(-1), ignore_index=PAD, label_smoothing=0.1, reduction="sum"
        )
        opt.zero_grad()
        (loss / tokens).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        print(samestep.sum(loss.item()) / tokens)
samestep.save("weights.pt", model.state_dict())
