import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset, Subset, ConcatDataset


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 10), nn.ReLU(), nn.Linear(10, 4))

    def forward(self, x):
        return F.normalize(self.net(x), dim=1)


def nt_xent(z1, z2, t=0.5):
    n = z1.size(0)
    z = torch.cat([z1, z2], 0)
    sim = z @ z.t() / t
    sim = sim.masked_fill(torch.eye(2 * n, dtype=torch.bool), float('-inf'))
    targets = torch.cat([torch.arange(n, 2 * n), torch.arange(n)])
    return F.cross_entropy(sim, targets)


torch.manual_seed(31)
a = TensorDataset(torch.randn(20, 8), torch.randint(0, 3, (20,)))
b = TensorDataset(torch.randn(16, 8), torch.randint(0, 3, (16,)))
full = ConcatDataset([a, b])
train_loader = DataLoader(Subset(full, range(28)), batch_size=7, shuffle=True, drop_last=True)
test_loader = DataLoader(Subset(full, range(28, 36)), batch_size=4)
encoder = Encoder()
opt = torch.optim.SGD(encoder.parameters(), lr=0.05)
for epoch in range(2):
    tot = 0
    for x, _ in train_loader:
        loss = nt_xent(encoder(x + 0.1), encoder(x * 0.9))
        opt.zero_grad()
        loss.backward()
        opt.step()
        tot += loss.item()
    print(epoch, tot / len(train_loader))
encoder.eval()
for p in encoder.parameters():
    p.requires_grad = False
probe = nn.Linear(4, 3)
opt2 = torch.optim.Adam(probe.parameters(), lr=0.05)
for epoch in range(2):
    for x, y in train_loader:
        loss = F.cross_entropy(probe(encoder(x)), y)
        opt2.zero_grad()
        loss.backward()
        opt2.step()
hits = sum((probe(encoder(x)).argmax(1) == y).sum().item() for x, y in test_loader)
print(f"probe accuracy {hits / 8:.3f}")
