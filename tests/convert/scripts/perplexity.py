import math
import torch
import torch.nn as nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

PAD = 0
torch.manual_seed(41)
corpus = [torch.randint(1, 15, (int(torch.randint(3, 9, (1,))),)) for _ in range(45)]


def collate(batch):
    padded = pad_sequence(batch, batch_first=True, padding_value=PAD)
    return padded[:, :-1], padded[:, 1:]


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(15, 8, padding_idx=PAD)
        self.rnn = nn.GRU(8, 8, batch_first=True)
        self.out = nn.Linear(8, 15)

    def forward(self, x):
        return self.out(self.rnn(self.emb(x))[0])


def evaluate(model, loader):
    model.eval()
    nll, tokens = 0.0, 0
    criterion = nn.CrossEntropyLoss(ignore_index=PAD, reduction='sum')
    with torch.no_grad():
        for src, tgt in loader:
            logits = model(src)
            nll += criterion(logits.reshape(-1, 15), tgt.reshape(-1)).item()
            tokens += (tgt != PAD).sum().item()
    return math.exp(nll / tokens)


train_iter = DataLoader(corpus[:34], batch_size=7, shuffle=True, collate_fn=collate)
valid_iter = DataLoader(corpus[34:], batch_size=4, collate_fn=collate)
model = LM()
criterion = nn.CrossEntropyLoss(ignore_index=PAD)
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
for epoch in range(1, 3):
    model.train()
    for i, (src, tgt) in enumerate(train_iter):
        optimizer.zero_grad()
        logits = model(src)
        loss = criterion(logits.reshape(-1, logits.shape[-1]), tgt.reshape(-1))
        loss.backward()
        optimizer.step()
        if i % 2 == 0:
            print('| epoch {:3d} | {:5d}/{:5d} batches | loss {:5.3f} | ppl {:8.3f}'.format(
                epoch, i, len(train_iter), loss.item(), math.exp(loss.item())))
    print('valid ppl {:8.3f}'.format(evaluate(model, valid_iter)))
torch.save(model.state_dict(), 'lm.pt')
