"""A decoder as in minGPT: three kinds of dropout, weight decay by group, warm-up, clipping, and samples drawn."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(5)
world = samestep.init()
text = torch.randint(0, 11, (40,))


class Windows(Dataset):
    def __len__(self):
        return len(text) - 6

    def __getitem__(self, index):
        return text[index : index + 6], text[index + 1 : index + 7]


class Block(nn.Module):
    def __init__(self, size, heads):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.qkv, self.proj = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.attn_drop, self.resid_drop = nn.Dropout(0.1), nn.Dropout(0.1)
        self.mlp = nn.Sequential(
            nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size), nn.Dropout(0.1)
        )

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(self.ln1(x)).split(c, 2))
        seen = torch.tril(torch.ones(t, t)) == 0
        att = (q @ k.transpose(2, 3) / (c / self.heads) ** 0.5).masked_fill(seen, -torch.inf)
        y = (self.attn_drop(F.softmax(att, -1)) @ v).transpose(1, 2).reshape(b, t, c)
        x = x + self.resid_drop(self.proj(y))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.place, self.drop = nn.Embedding(11, 8), nn.Embedding(6, 8), nn.Dropout(0.1)
        self.blocks, self.head = nn.Sequential(Block(8, 2), Block(8, 2)), nn.Linear(8, 11)

    def forward(self, tokens, targets=None):
        x = self.drop(self.token(tokens) + self.place(torch.arange(tokens.shape[1])))
        logits = self.head(self.blocks(x))
        return logits, None if targets is None else F.cross_entropy(logits.view(-1, 11), targets.view(-1))


train = samestep.loader(Windows(), batch_size=8, shuffle=True)
model = samestep.replicate(GPT().to(world.device), same=True)
decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others}], lr=0.01)
warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
for epoch in range(3):
    model.train()
    for x, y in train:
        _, loss = model(x, y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warm.step()
        print("loss", samestep.mean(loss.item()))
    model.eval()
    with torch.no_grad():
        tokens = text[None, :3]
        for _ in range(3):
            tokens = torch.cat([tokens, torch.multinomial(model(tokens)[0][:, -1].softmax(-1), 1)], 1)
    print(epoch, tokens.tolist())
samestep.save("weights.pt", model.state_dict())
