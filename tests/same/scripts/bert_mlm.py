"""Masked language modelling as Hugging Face's collator does it, in the loop: bernoulli masks, random words, padding."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(8)
samestep.init()
V, MASK = 20, 19
tokens = torch.randint(2, 19, (33, 10))
lengths = torch.randint(4, 11, (33,))
tokens[torch.arange(10) >= lengths[:, None]] = 0
train = samestep.loader(TensorDataset(tokens), batch_size=10, shuffle=True)


def mask_tokens(inputs):
    inputs, labels = inputs.clone(), inputs.clone()
    probability = torch.full(labels.shape, 0.3)
    probability.masked_fill_(labels == 0, value=0.0)
    masked = torch.bernoulli(probability).bool()
    labels[~masked] = -100
    replaced = torch.bernoulli(torch.full(labels.shape, 0.8)).bool() & masked
    inputs[replaced] = MASK
    randomized = torch.bernoulli(torch.full(labels.shape, 0.5)).bool() & masked & ~replaced
    inputs[randomized] = torch.randint(V, labels.shape)[randomized]
    return inputs, labels


class Bert(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.pos = nn.Embedding(V, 8, padding_idx=0), nn.Parameter(torch.zeros(10, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True, activation="gelu")
        self.layers, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(8, V)

    def forward(self, x, keep):
        h = F.dropout(self.emb(x) + self.pos, 0.1, self.training)
        return self.head(self.layers(h, src_key_padding_mask=~keep))


model = samestep.replicate(Bert(), same=True, loss="sum")
opt = torch.optim.AdamW(model.parameters(), 5e-3)
for _ in range(3):
    for (x,) in train:
        inputs, labels = mask_tokens(x)
        count = samestep.sum((labels != -100).sum().item())
        loss = F.cross_entropy(model(inputs, x != 0).flatten(0, 1), labels.flatten(), reduction="sum")
        opt.zero_grad()
        (loss / max(count, 1)).backward()
        opt.step()
        print(samestep.sum(loss.item()) / max(count, 1))
samestep.save("weights.pt", model.state_dict())
