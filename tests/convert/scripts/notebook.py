# In[1]:
import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, Subset
import random, math, time, os
from typing import NamedTuple

# In[2]:
class Batch(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor

class DS(Dataset):
    def __init__(self, n): self.n = n; self.x = torch.randn(n, 5); self.y = (self.x[:, 0] > 0).long()
    def __len__(self): return self.n
    def __getitem__(self, i): return self.x[i], self.y[i]

def collate(samples):
    xs, ys = zip(*samples)
    return Batch(torch.stack(xs), torch.stack(ys))

class Net(nn.Module):
    def __init__(self, d=8):
        super().__init__()
        self.enc = nn.ModuleList([nn.Linear(5 if i == 0 else d, d) for i in range(2)])
        self.cls = nn.Linear(d, 2)
    def encode(self, x):
        for l in self.enc: x = torch.tanh(l(x))
        return x
    def forward(self, x): return self.cls(self.encode(x))
    def loss(self, b):
        logits = self(b.x)
        return F.cross_entropy(logits, b.y), (logits.argmax(-1) == b.y).float().mean()
    def configure(self, lr): return torch.optim.Adam(self.parameters(), lr=lr)

# In[3]:
seed = 5
random.seed(seed); torch.manual_seed(seed)
full = DS(60); idx = list(range(60)); random.shuffle(idx)
train_dl = DataLoader(Subset(full, idx[:43]), batch_size=8, shuffle=True, collate_fn=collate)
val_dl = DataLoader(Subset(full, idx[43:]), batch_size=6, collate_fn=collate)
net = Net(); opt = net.configure(1e-2)
sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda e: 0.9 ** e)

# In[4]:
t0 = time.time()
for ep in range(3):
    net.train(); tl = ta = 0.
    for b in train_dl:
        l, a = net.loss(b)
        opt.zero_grad(); l.backward(); nn.utils.clip_grad_norm_(net.parameters(), 1.); opt.step()
        tl += l.item() / len(train_dl); ta += a.item() / len(train_dl)
    sched.step(); net.eval()
    with torch.no_grad():
        vl, va = zip(*[[t.item() for t in net.loss(b)] for b in val_dl])
    print(f'{ep}: train {tl:.4f} {ta:.3f} | val {sum(vl)/len(vl):.4f} {sum(va)/len(va):.3f} | lr {sched.get_last_lr()[0]:.5f}')
torch.save(net.state_dict(), 'net.pt')
