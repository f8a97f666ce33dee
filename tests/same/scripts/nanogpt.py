"""A small GPT in the style of nanoGPT: fused attention with dropout, accumulation, clipping, a loss estimate."""

import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import samestep

torch.set_default_dtype(torch.float64)
torch.manual_seed(1337)
device = samestep.init().device
text = torch.randint(0, 17, (260,))
block_size, n_embd, n_head = 8, 12, 3


class Windows(Dataset):
    def __init__(self, data):
        self.data = data

    def __len__(self):
        return (len(self.data) - 1) // block_size

    def __getitem__(self, i):
        at = i * block_size
        return self.data[at : at + block_size], self.data[at + 1 : at + 1 + block_size]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.c_attn, self.c_proj = (
            nn.Linear(n_embd, 3 * n_embd, bias=False),
            nn.Linear(n_embd, n_embd, bias=False),
        )
        self.mlp = nn.Sequential(nn.Linear(n_embd, 24), nn.GELU(), nn.Linear(24, n_embd), nn.Dropout(0.2))
        self.resid = nn.Dropout(0.2)

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (
            part.view(B, T, n_head, C // n_head).transpose(1, 2)
            for part in self.c_attn(self.ln_1(x)).split(C, dim=2)
        )
        dropout = 0.2 if self.training else 0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=dropout, is_causal=True)
        x = x + self.resid(self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C)))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(17, n_embd), nn.Embedding(block_size, n_embd)
        self.drop, self.h, self.ln_f = (
            nn.Dropout(0.2),
            nn.ModuleList([Block(), Block()]),
            nn.LayerNorm(n_embd),
        )
        self.lm_head = nn.Linear(n_embd, 17, bias=False)
        self.wte.weight = self.lm_head.weight
        self.apply(lambda m: isinstance(m, nn.Linear) and nn.init.normal_(m.weight, std=0.02))

    def forward(self, idx, targets=None):
        x = self.drop(self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device)))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        loss = (
            None
            if targets is None
            else F.cross_entropy(logits.view(-1, 17), targets.view(-1), ignore_index=-1)
        )
        return logits, loss


train = samestep.loader(Windows(text[:200]), batch_size=6, shuffle=True)
val = samestep.loader(Windows(text[200:]), batch_size=5)
model = samestep.replicate(GPT().to(device), same=True)
decay = [p for p in model.parameters() if p.dim() >= 2]
rest = [p for p in model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW(
    [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
    lr=1e-2,
    betas=(0.9, 0.95),
)


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses, count = 0.0, 0
    for x, y in val:
        _, loss = model(x, y)
        losses, count = losses + loss.item() * len(x), count + len(x)
    model.train()
    return samestep.sum(losses) / samestep.sum(count)


it = 0
for _ in range(3):
    for x, y in train:
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * 0.5 * (1 + math.cos(math.pi * it / 20))
        last = it % 2 == 1
        with samestep.no_sync(model, enabled=not last):
            _, loss = model(x, y)
            (loss / 2).backward()
        print(f"iter {it}: loss {samestep.mean(loss.item())!r}")
        if last:
            print("norm", torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if it % 5 == 0:
            print("val", estimate_loss())
        it += 1
samestep.save("weights.pt", model.state_dict())
