"""An AWD-LSTM: locked dropout over time, dropout of weights and of rows of the embedding, activation penalties."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(14)
samestep.init()
text = torch.randint(0, 12, (34, 7))
train = samestep.loader(TensorDataset(text), batch_size=7, shuffle=True)


def locked(x, p, training):
    if not training:
        return x
    mask = x.new_empty(1, x.size(1), x.size(2)).bernoulli_(1 - p) / (1 - p)
    return x * mask.expand_as(x)


class AWD(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.rnns = nn.Embedding(12, 6), nn.ModuleList([nn.LSTMCell(6, 8), nn.LSTMCell(8, 6)])

    def forward(self, words):
        keep = torch.empty(12, 1).bernoulli_(0.9).div(0.9) if self.training else 1.0
        x = locked(F.embedding(words.t(), self.emb.weight * keep), 0.2, self.training)
        for rnn in self.rnns:
            w_hh = F.dropout(rnn.weight_hh, 0.3, self.training)
            h = c = x.new_zeros(x.size(1), rnn.hidden_size)
            outs = []
            for step in x:
                gates = F.linear(step, rnn.weight_ih, rnn.bias_ih) + F.linear(h, w_hh, rnn.bias_hh)
                i, f, g, o = gates.chunk(4, 1)
                c = f.sigmoid() * c + i.sigmoid() * g.tanh()
                h = o.sigmoid() * c.tanh()
                outs.append(h)
            raw = torch.stack(outs)
            x = locked(raw, 0.25, self.training)
        return x @ self.emb.weight.t(), raw, x


model = samestep.replicate(AWD(), same=True)
opt = torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=1e-5)
for _ in range(3):
    for (words,) in train:
        logits, raw, dropped = model(words[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), words[:, 1:].t().flatten())
        total = loss + 2 * dropped.pow(2).mean() + (raw[1:] - raw[:-1]).pow(2).mean()
        opt.zero_grad()
        total.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        opt.step()
        print(samestep.mean(loss.item()), samestep.mean(total.item()))
samestep.save("weights.pt", model.state_dict())
