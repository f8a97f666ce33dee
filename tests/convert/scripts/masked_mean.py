import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(16)
x, y = torch.randn(38, 5, 4), torch.randn(38, 5)
mask = (torch.rand(38, 5) < 0.6).float()
dl = DataLoader(TensorDataset(x, y, mask), batch_size=8, shuffle=True, drop_last=False)
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for ep in range(3):
    tot = 0.0
    n = 0
    for xb, yb, mb in dl:
        out = net(xb).squeeze(-1)
        se = (out - yb) ** 2
        loss = (se * mb).sum() / mb.sum()
        opt.zero_grad()
        loss.backward()
        opt.step()
        tot += (se.detach() * mb).sum().item()
        n += mb.sum().item()
    print("epoch %d mse %.6f over %d" % (ep, tot / n, n))
torch.save(net.state_dict(), "masked.pt")
