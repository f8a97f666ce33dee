import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
dl = DataLoader(TensorDataset(torch.randn(30, 4), torch.randn(30, 2)), batch_size=7)
net = nn.Linear(4, 2)
opt = torch.optim.SGD(net.parameters(), .1)
stats = {"a": 0.0, "b": 0.0}
for e in range(2):
    for k in stats: stats[k] = 0.0
    n = 0
    for x, y in dl:
        losses = {"a": ((net(x) - y) ** 2).mean(), "b": (net(x) - y).abs().mean()}
        l = sum(losses.values())
        opt.zero_grad(); l.backward(); opt.step()
        for k, v in losses.items():
            stats[k] += v.item() * len(x)
        n += len(x)
    print(e, {k: v / n for k, v in stats.items()})
