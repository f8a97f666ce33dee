import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

CHARS = "abcd"
stoi = {c: i + 2 for i, c in enumerate(CHARS)}
itos = {i: c for c, i in stoi.items()}
SOS, EOS = 0, 1


class Reverse(Dataset):
    def __init__(self, n, length=4, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.src = torch.randint(2, 2 + len(CHARS), (n, length), generator=g)

    def __len__(self):
        return len(self.src)

    def __getitem__(self, i):
        return self.src[i], self.src[i].flip(0)


class Seq2Seq(nn.Module):
    def __init__(self, vocab, dim=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.enc = nn.GRU(dim, dim, batch_first=True)
        self.dec = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, vocab)

    def forward(self, src, tgt):
        _, h = self.enc(self.emb(src))
        start = torch.full((src.size(0), 1), SOS, dtype=torch.long, device=src.device)
        inp = torch.cat([start, tgt[:, :-1]], dim=1)
        o, _ = self.dec(self.emb(inp), h)
        return self.out(o)

    @torch.no_grad()
    def greedy(self, src, steps):
        _, h = self.enc(self.emb(src))
        tok = torch.full((src.size(0), 1), SOS, dtype=torch.long, device=src.device)
        result = []
        for _ in range(steps):
            o, h = self.dec(self.emb(tok), h)
            tok = self.out(o).argmax(-1)
            result.append(tok)
        return torch.cat(result, dim=1)


def decode(ids):
    return "".join(itos.get(int(i), "?") for i in ids)


torch.manual_seed(0)
train_loader = DataLoader(Reverse(50), batch_size=8, shuffle=True)
test_loader = DataLoader(Reverse(13, seed=1), batch_size=4)
model = Seq2Seq(len(CHARS) + 2)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
criterion = nn.CrossEntropyLoss()
for epoch in range(2):
    model.train()
    epoch_loss = 0
    for src, tgt in train_loader:
        optimizer.zero_grad()
        logits = model(src, tgt)
        loss = criterion(logits.transpose(1, 2), tgt)
        loss.backward()
        optimizer.step()
        epoch_loss += loss.item()
    model.eval()
    hyps, refs = [], []
    for src, tgt in test_loader:
        pred = model.greedy(src, tgt.size(1))
        for p, t in zip(pred, tgt):
            hyps.append(decode(p))
            refs.append(decode(t))
    exact = sum(h == r for h, r in zip(hyps, refs)) / len(refs)
    char_hits = sum(sum(a == b for a, b in zip(h, r)) for h, r in zip(hyps, refs))
    char_total = sum(len(r) for r in refs)
    print(f"Epoch {epoch}: loss {epoch_loss / len(train_loader):.4f}, exact {exact:.3f}, chars {char_hits / char_total:.3f}")
