import math
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Blocks(Dataset):
    def __init__(self, tokens, block):
        self.tokens, self.block = tokens, block

    def __len__(self):
        return (len(self.tokens) - 1) // self.block

    def __getitem__(self, i):
        at = i * self.block
        return self.tokens[at : at + self.block], self.tokens[at + 1 : at + self.block + 1]


class LM(nn.Module):
    def __init__(self, vocab=17, d=8):
        super().__init__()
        self.e, self.r, self.o = nn.Embedding(vocab, d), nn.GRU(d, d, batch_first=True), nn.Linear(d, vocab)

    def forward(self, x):
        return self.o(self.r(self.e(x))[0])


torch.manual_seed(7)
tokens = torch.randint(0, 17, (400,))
train_dl = DataLoader(Blocks(tokens[:300], 7), batch_size=6, shuffle=True, drop_last=True)
valid_dl = DataLoader(Blocks(tokens[300:], 7), batch_size=5)
model = LM()
criterion = nn.CrossEntropyLoss()
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=1e-2, total_steps=2 * len(train_dl))


def evaluate(model, loader):
    model.eval()
    losses = []
    ntokens = 0
    total = 0.0
    with torch.no_grad():
        for x, y in loader:
            logits = model(x)
            loss = criterion(logits.reshape(-1, logits.size(-1)), y.reshape(-1))
            losses.append(loss.item())
            total += loss.item() * y.numel()
            ntokens += y.numel()
    return total / ntokens, math.exp(total / ntokens), losses


for epoch in range(2):
    model.train()
    total_loss, total_tokens = 0.0, 0
    for i, (x, y) in enumerate(train_dl):
        opt.zero_grad()
        logits = model(x)
        loss = criterion(logits.view(-1, 17), y.view(-1))
        loss.backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.05)
        opt.step()
        scheduler.step()
        total_loss += loss.item() * x.size(0) * x.size(1)
        total_tokens += x.size(0) * x.size(1)
    val, ppl, _ = evaluate(model, valid_dl)
    print(f"| epoch {epoch} | ppl {math.exp(total_loss / total_tokens):8.3f} | valid {val:.4f} | valid ppl {ppl:.3f}")
torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, "lm.pt")
