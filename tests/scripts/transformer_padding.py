"""A transformer over padded sequences, a token-weighted loss with everyone's count, Adam.

verdict: same
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8, padding_idx=0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(8, 5)

    def forward(self, tokens):
        return self.head(self.body(self.embed(tokens), src_key_padding_mask=tokens == 0))


torch.manual_seed(5)
samestep.init()
tokens = torch.randint(1, 16, (32, 6))
tokens[torch.arange(6) >= torch.randint(2, 7, (32, 1))] = 0
labels = torch.where(tokens == 0, -100, tokens % 5)
loader = samestep.loader(TensorDataset(tokens, labels), batch_size=8, shuffle=True)
model = samestep.replicate(Tagger(), loss="sum")
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for _ in range(3):
    for x, y in loader:
        loss_sum = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-100, reduction="sum")
        count = (y != -100).sum().item()
        optimizer.zero_grad()
        (loss_sum / samestep.sum(count)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
