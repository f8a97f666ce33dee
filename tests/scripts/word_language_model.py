"""pytorch/examples word_language_model: an LSTM, clipped gradients, the learning rate falls with everyone's loss.

verdict: same
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep


class RNNModel(nn.Module):
    def __init__(self, words=20):
        super().__init__()
        self.encoder = nn.Embedding(words, 6)
        self.rnn = nn.LSTM(6, 8, batch_first=True)
        self.decoder = nn.Linear(8, words)

    def forward(self, x):
        return self.decoder(self.rnn(self.encoder(x))[0])


torch.manual_seed(1111)
samestep.init()
corpus = torch.randint(0, 20, (36, 7))
train_data = samestep.loader(TensorDataset(corpus[:24]), 6, shuffle=True)
val_data = samestep.loader(TensorDataset(corpus[24:]), 6)
model = samestep.replicate(RNNModel())
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
best = None
for epoch in range(3):
    model.train()
    for (tokens,) in train_data:
        optimizer.zero_grad()
        loss = criterion(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
    model.eval()
    total = 0.0
    with torch.no_grad():
        for (tokens,) in val_data:
            loss = criterion(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            total += loss.item() * len(tokens)
    val_loss = samestep.sum(total) / 12
    print(
        f"| end of epoch {epoch} | valid loss {val_loss:5.2f} | valid ppl {torch.tensor(val_loss).exp():8.2f}"
    )
    if best is None or val_loss < best:
        best = val_loss
        samestep.save("model.pt", model.state_dict())
    else:
        optimizer.param_groups[0]["lr"] /= 4.0
